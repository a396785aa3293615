"""Turning Triton's interpreter on, so that kernels run on CPU tensors where there is no GPU.

Triton chooses interpreter or compiler when ``@triton.jit`` decorates a function, its own library
(``tl.sum``, ``tl.cdiv``) included.  A program that imported triton before us has that library
decorated for the compiler already, so it is decorated again here.  Kernels therefore call
``tl.sum(x)``, never ``x.sum()``: methods keep the first decoration.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

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
    _skip_needless_work()
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


def _skip_needless_work() -> None:
    """Leave out what Triton's interpreter does for nothing, and most of its time goes to.

    A launch patches Triton's language, and then each call of one kernel function by another does so
    again.  And each sum of integers is checked for overflow, with no one told unless in debug mode.
    """
    from triton import language
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang", None)
    builder = getattr(interpreter, "interpreter_builder", None)
    options: Any = getattr(builder, "options", None)
    if patch is None or builder is None or not hasattr(options, "sanitize_overflow"):
        return  # another Triton's interpreter: as it comes
    if not options.debug:
        builder.options = dataclasses.replace(options, sanitize_overflow=False)

    seen_by: dict[object, list] = {}

    def patch_once(fn):
        if fn not in seen_by:
            names = fn.__globals__.values()
            seen_by[fn] = [m for m in names if m is language or m is language.core]
        seen = seen_by[fn]
        # Some of each thing that is patched: all are, or none.
        probes = [language.tensor.__add__, *(module.load for module in seen)]
        is_patched = seen and not any(language.core.is_builtin(probe) for probe in probes)
        return interpreter._LangPatchScope() if is_patched else patch(fn)

    interpreter._patch_lang = patch_once
