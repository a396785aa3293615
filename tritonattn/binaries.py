"""Kernels by what selects their machine code; the only file that compiles or launches anything.

Triton's own launch path specialises integers that are 1 or divisible by 16, so a batch of one or an
odd stride would compile in the middle of serving.  Here a binary is selected by the kernel, its
constants, its options and its arguments' dtypes, and by nothing else: no length, batch size or
stride can cause a compile.  Alignment is a constant that the caller states.

A kernel's runtime arguments are tensors, numbers, None, or named tuples of these; constants may be
named tuples too.  Integers travel as int32, except the fields of named tuples whose names start
with ``stride``: these are int64.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .device import Device
from .errors import UnsupportedError

_TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip


class Options(NamedTuple):
    num_warps: int = 4
    num_stages: int = 1


_compiled: dict[tuple, Any] = {}
_HERE = contextlib.nullcontext()


def launch(
    kernel,
    grid: int,
    args: tuple,
    constants: Mapping[str, object],
    options: Options,
    device: Device,
    where: torch.device,
    memo: dict[int, Any] | None = None,
) -> None:
    """Run ``kernel`` over ``grid`` programs on the current stream of ``where``.

    An empty grid runs nothing.  ``memo`` belongs to a caller whose kernel, constants, options and
    dtypes never change: it keeps each GPU's binary, so that none of them is looked at again.
    """
    if grid == 0:
        return
    if device.is_interpreter:
        kernel[(grid,)](*args, **constants)
        return
    index = where.index if where.index is not None else torch.cuda.current_device()
    other = index != torch.cuda.current_device()
    with torch.cuda.device(index) if other else _HERE:
        binary = memo.get(index) if memo is not None else None
        if binary is None:
            binary = _find(kernel, index, args, constants, options, device)
            if memo is not None:
                memo[index] = binary
        try:
            binary[(grid, 1, 1)](*args, *constants.values())
        except triton.OutOfResources as error:
            raise UnsupportedError(
                f"{kernel.__name__}: needs {error.required} of {error.name} with "
                f"{options.num_warps} warps and {options.num_stages} stages; {device.title} has "
                f"{error.limit}. "
                "Use a configuration with smaller tiles or fewer stages."
            ) from error


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
    source = ASTSource(kernel, signature, constexprs)
    target = GPUTarget(device.backend, device.arch, device.warp_size)
    # Stated, as Triton 3.10 changes the default and equal bits are promised.
    stated = {**options._asdict(), "enable_fp_fusion": True}
    return triton.compile(source, target=target, options=stated)


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
    if isinstance(arg, tuple):
        return type(arg)(*map(_type, arg, arg._fields))  # type: ignore[attr-defined,arg-type]
    if isinstance(arg, int):
        return "i64" if name.startswith("stride") else "i32"
    return "fp32"
