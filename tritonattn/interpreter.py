"""Turning Triton's interpreter on, so that kernels run on CPU tensors where there is no GPU.

Triton chooses interpreter or compiler when ``@triton.jit`` decorates a function, its own library
(``tl.sum``, ``tl.cdiv``) included.  A program that imported triton before us has that library
decorated for the compiler already, so it is decorated again here.  Kernels therefore call
``tl.sum(x)``, never ``x.sum()``: methods keep the first decoration.
"""

from __future__ import annotations

import sys

from . import settings
from .errors import UnsupportedError

_ADVICE = "Set TRITON_INTERPRET=1 in the environment before anything imports triton."


def enable() -> None:
    """Make every kernel that is decorated from now on an interpreted one; say so once on stderr."""
    import triton

    if reason := broken():
        raise UnsupportedError(f"tritonattn: no GPU was found, and {reason}.")
    if not triton.knobs.runtime.interpret:
        triton.knobs.runtime.interpret = True
        _redecorate_library()
    if not settings.QUIET:
        print(
            "tritonattn: no GPU found, so kernels run on the CPU through Triton's interpreter: "
            "right, but slow. Set TRITONATTN_QUIET=1 to silence this notice.",
            file=sys.stderr,
        )


def broken() -> str:
    """Why the interpreter cannot work here, and what helps; "" if it can."""
    import numpy
    import triton

    numpy_version = tuple(int(part) for part in numpy.__version__.split(".")[:2])
    if triton.__version__.startswith("3.6.") and numpy_version >= (2, 4):
        return (
            f"the interpreter of triton {triton.__version__} does not work with numpy "
            f"{numpy.__version__}: install triton>=3.7 or numpy<2.4"
        )
    return ""


def _redecorate_library() -> None:
    try:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError as error:
        raise UnsupportedError(
            "tritonattn: no GPU was found and this triton's interpreter could not be turned on "
            f"({error}). {_ADVICE}"
        ) from error
    modules = [m for name, m in sys.modules.items() if m and name.startswith("triton.language")]
    interpreted: dict[int, InterpretedFunction] = {}
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                replacement = interpreted.setdefault(id(value), InterpretedFunction(value.fn))
                setattr(module, name, replacement)
