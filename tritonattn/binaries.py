"""Kernels by what selects their machine code; the only file that compiles or launches anything.

Triton's own launch path specialises integers that are 1 or divisible by 16, so a batch of one or an
odd stride would compile in the middle of serving.  Here a binary is selected by the kernel, its
constants, its options and its arguments' dtypes, and by nothing else: no length, batch size or
stride can cause a compile.  Alignment is a constant that the caller states.

A kernel's runtime arguments are tensors, numbers, None, named tuples of these, or boxes; constants
may be named tuples too.  Integers travel as int32, except the fields of named tuples whose names
start with ``stride``: these are int64.  Kernels are Triton's or Gluon's.

Whoever launches often keeps a ``Repeat`` of what ``launch`` returns.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .boxes import Box
from .device import Device
from .errors import UnsupportedError
from .repeat import Repeatable

_TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip


class Options(NamedTuple):
    num_warps: int = 4
    num_stages: int = 1
    # Programmatic dependent launch: the kernel waits for the one before it by ``gdc_wait``.
    launch_pdl: bool = False


class Work(NamedTuple):
    """What is to be launched."""

    kernel: Any
    grid: int
    args: tuple
    constants: Mapping[str, object]
    options: Options
    # The arguments, once the binary's registers a thread and bytes of shared memory are known.
    settle: Callable[[tuple, int, int], tuple] | None = None


_compiled: dict[tuple, Any] = {}


def launch(
    kernel,
    grid: int,
    args: tuple,
    constants: Mapping[str, object],
    options: Options,
    device: Device,
    where: torch.device,
    settle: Callable[[tuple, int, int], tuple] | None = None,
) -> Repeatable | None:
    """Run ``kernel`` over ``grid`` programs on the current stream of ``where``.

    An empty grid runs nothing.  What is returned can make the same launch again with other tensors;
    None where nothing ran, and of the interpreter.
    """
    if grid == 0:
        return None
    if device.is_interpreter:
        kernel[(grid,)](*args, **constants)
        return None
    index = where.index if where.index is not None else torch.cuda.current_device()
    with torch.cuda.device(index):
        binary = _find(kernel, index, args, constants, options, device)
        if settle is not None:
            binary._init_handles()  # loads it, which tells its registers
            args = settle(args, binary.n_regs, binary.metadata.shared)
        values = tuple(constants.values())
        try:
            binary[(grid, 1, 1)](*args, *values)
        except triton.OutOfResources as error:
            raise UnsupportedError(
                f"{kernel.__name__}: needs {error.required} of {error.name} with "
                f"{options.num_warps} warps and {options.num_stages} stages; {device.title} has "
                f"{error.limit}. "
                "Use a configuration with smaller tiles or fewer stages."
            ) from error
        return Repeatable(binary, grid, args, _signature(args), values, index)


def _find(kernel, index: int, args: tuple, constants, options: Options, device: Device):
    key = (kernel, index, tuple(constants.values()), _signature(args), options)
    binary = _compiled.get(key)
    if binary is None:
        binary = _compiled[key] = compile_for(kernel, args, constants, options, device)
    return binary


def compile_for(
    kernel, args: tuple, constants: Mapping[str, object], options: Options, device: Device
):
    """The compiled kernel for ``device``, which need not be there.

    ``args`` give dtypes only, CPU tensors will do.
    """
    names = kernel.arg_names
    given = _signature(args)
    signature: dict[str, object] = dict(zip(names, given, strict=False))
    constexprs: dict[tuple[int, ...], object] = {}
    for name, value in constants.items():
        i = names.index(name)
        if isinstance(value, tuple):
            signature[name] = type(value)(*("constexpr" for _ in value))
            constexprs |= {(i, j): part for j, part in enumerate(value)}
        else:
            signature[name] = "constexpr"
            constexprs[(i,)] = value
    for i, entry in enumerate(given):
        if entry == "constexpr":
            constexprs[(i,)] = None
        elif isinstance(entry, tuple):
            constexprs |= {(i, j): None for j, part in enumerate(entry) if part == "constexpr"}
    source = _source_of(kernel)(kernel, signature, constexprs)
    target = GPUTarget(device.backend, device.arch, device.warp_size)
    # Stated, as Triton 3.10 changes the default and equal bits are promised.
    stated = {**options._asdict(), "enable_fp_fusion": True}
    return triton.compile(source, target=target, options=stated)


def _source_of(kernel) -> type[ASTSource]:
    if not kernel.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


@atexit.register
def _leave_to_the_process() -> None:
    """Binaries die with it.  Triton 3.9 would unload each as the interpreter shuts down, by modules
    of its own that are gone by then, and complain on stderr."""
    for binary in _compiled.values():
        binary.module = None


def count() -> int:
    """How many binaries this process has compiled or loaded."""
    return len(_compiled)


def _signature(args: tuple) -> tuple:
    return tuple(_type(arg, "") for arg in args)


def _type(arg: object, name: str) -> object:
    if arg is None:
        return "constexpr"
    if isinstance(arg, torch.Tensor):
        return _TYPES[arg.dtype]
    if isinstance(arg, Box):
        size = ",".join(map(str, arg.block_shape))
        layout = "" if arg.layout is None else f",{arg.layout!r}"
        return f"tensordesc<{_TYPES[arg.dtype][1:]}[{size}]{layout}>"
    if isinstance(arg, tuple):
        return type(arg)(*map(_type, arg, arg._fields))  # type: ignore[attr-defined,arg-type]
    if isinstance(arg, int):
        return "i64" if name.startswith("stride") else "i32"
    return "fp32"
