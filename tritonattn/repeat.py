"""A launch made again: all of it but the stream and the addresses of its tensors is known.

A launch costs the host more than a small kernel costs the GPU, and most of that is spent on what is
the same each time: Triton's launcher looks through the nested arguments, constants among them, and
encodes a box for TMA wherever there is one.  So the first launch of a kind is kept as a function of
the addresses alone.  It calls a launcher that Triton makes for the same binary as if its arguments
stood in one row without constants, which are the parameters that the driver gets either way, and
calls the C function behind it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton

from . import device as devices
from .boxes import Box

_MOST_MAPS = 64  # encoded boxes of one argument, by address
_STREAM = object()  # stands where a launch takes its stream

_hooks = triton.knobs.runtime


class Repeatable(NamedTuple):
    """A launch that was made.  It holds its tensors, so it is not for keeping: its Repeat is.

    ``types`` are Triton's of the arguments, nested as these are; ``constants`` follow them.
    """

    binary: Any
    grid: int
    args: tuple
    types: tuple
    constants: tuple
    gpu: int


class Repeat:
    """A launch that was made once: later ones differ in the addresses of its tensors alone.

    ``addresses`` are the first launch's, in the order in which the arguments hold them.  ``run``
    takes the current stream, then such addresses.  ``run_hooked`` does the same by the ordinary
    way, for those who hang on to it: see ``is_hooked``.
    """

    __slots__ = ("addresses", "gpu", "run", "run_hooked")

    def __init__(self, launched: Repeatable) -> None:
        binary, grid, args, types, constants, self.gpu = launched
        everything = (*args, *constants)
        self.addresses, self.run_hooked = _composed(binary[(grid, 1, 1)], everything)
        try:
            handed = _in_a_row(binary, grid, args, types)
        except (AttributeError, ImportError, TypeError):
            handed = None  # a Triton whose launchers are made in another way
        if handed is not None:
            addresses, self.run = _composed(*handed)
        if handed is None or addresses != self.addresses:
            handles = binary.function, binary.packed_metadata
            usual = (grid, 1, 1, _STREAM, *handles, None, None, None, *everything)
            _, self.run = _composed(binary.run, usual)

    def __call__(self, *addresses: int) -> None:
        """Launch again, on the current stream."""
        if self.gpu != devices.current():
            with torch.cuda.device(self.gpu):
                self(*addresses)
            return
        run = self.run_hooked if is_hooked() else self.run
        run(devices.stream_of(self.gpu), *addresses)


def is_hooked() -> bool:
    """Whether someone, such as a profiler, wants to hear of launches what Triton itself gathers."""
    enter, leave = _hooks.launch_enter_hook, _hooks.launch_exit_hook
    # Each a chain, which may be empty, or a function or None.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


# Arguments in a row


class _Map(NamedTuple):
    """A box as its kernel gets it: encoded, which takes the host microseconds an address."""

    box: Box
    encode: Callable[[int], object]


def _in_a_row(
    binary: Any, grid: int, args: tuple, types: tuple
) -> tuple[Callable[..., None], tuple] | None:
    """The C function that launches, and what it is given, the tensors among it as themselves.

    Launchers put the same around the arguments at each launch, in an order of each Triton's own: so
    one is asked once, with something in place of that function which takes down what it is given.
    None where that is not known: on other drivers than NVIDIA's, for kernels that want memory of
    their own at each launch, and for boxes that the GPU does not copy by itself.
    """
    make = getattr(triton.runtime.driver.active, "launcher_cls", None)
    metadata = binary.metadata
    target = getattr(metadata, "target", None)
    if make is None or target is None or target.backend != "cuda":
        return None
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        return None
    if getattr(metadata, "instrumentation_mode", ""):
        return None
    maps = list(getattr(metadata, "tensordesc_meta", None) or ())
    row: list[tuple[str, Any]] = []
    for kind, arg in _leaves(types, args):
        if not isinstance(arg, Box):
            row.append((kind, arg))
            continue
        if not maps:
            return None
        made = _map(arg, maps.pop(0))
        row += [("nvTmaDesc", made), *(("i32", n) for n in arg.shape)]
        row += [("i64", n) for n in arg.strides]
    launcher = _launchers.get(binary)
    if launcher is None:
        kinds = dict(enumerate(kind for kind, _ in row))
        source = SimpleNamespace(fn=None, constants={}, signature=kinds)
        if getattr(metadata, "tensordesc_meta", None):
            metadata = metadata._replace(tensordesc_meta=[])
        launcher = _launchers[binary] = make(source, metadata)

    handed: list[tuple] = []
    asked = copy.copy(launcher)
    asked.launch = lambda *given: handed.append(given)
    parameters = [arg for _, arg in row]
    handles = binary.function, binary.packed_metadata
    asked(grid, 1, 1, _STREAM, *handles, None, None, None, *parameters)
    return (launcher.launch, handed[0]) if handed else None


_launchers: dict[Any, Any] = {}  # by binary


def _leaves(types: tuple, args: tuple) -> Iterator[tuple[str, Any]]:
    """The parameters of a kernel, which a None is not, and their types."""
    for kind, arg in zip(types, args, strict=True):
        if isinstance(kind, tuple):
            yield from _leaves(kind, arg)
        elif kind != "constexpr":
            yield kind, arg


def _map(box: Box, how: dict[str, Any]) -> _Map:
    """A map says nothing but what follows: it holds for whatever tensor is at the address."""
    from triton.backends.nvidia import driver

    # Newer Tritons have a third argument, what else is launched, and do not look at it.
    more = ((),) * (driver.make_tensordesc_arg.__code__.co_argcount - 2)

    @functools.lru_cache(_MOST_MAPS)
    def encode(address: int) -> object:
        return driver.make_tensordesc_arg(box.at(address), how, *more)[0]

    return _Map(box, encode)


# Functions of addresses


def _composed(function: Callable[..., None], args: tuple) -> tuple[list[int], Callable[..., None]]:
    """The addresses of the tensors among ``args``, and ``function(*args)`` as a function of a
    stream and of such addresses.

    It is compiled from a display of nested tuples, which Python builds faster than any loop over
    their parts does.
    """
    addresses: list[int] = []
    constants: dict[str, object] = {"function": function}

    def constant(value: object) -> str:
        constants[name := f"c{len(constants)}"] = value
        return name

    def display(arg: object) -> str:
        if arg is _STREAM:
            return "stream"
        if isinstance(arg, torch.Tensor):
            addresses.append(arg.data_ptr())
            return f"p{len(addresses)}"
        if isinstance(arg, Box | _Map):
            box = arg if isinstance(arg, Box) else arg.box
            addresses.append(box.data_ptr())
            made = constant(arg.at if isinstance(arg, Box) else arg.encode)
            return f"{made}(p{len(addresses)})"
        if isinstance(arg, tuple) and _varies(arg):
            return f"({', '.join(map(display, arg))},)"
        return constant(arg)

    body = ", ".join(map(display, args))
    names = "".join(f", p{i + 1}" for i in range(len(addresses)))
    return addresses, eval(_compiled(f"lambda stream{names}: function({body})"), constants)


@functools.lru_cache(4096)
def _compiled(text: str) -> CodeType:
    return compile(text, __file__, "eval")


def _varies(arg: object) -> bool:
    if isinstance(arg, tuple) and not isinstance(arg, _Map):
        return any(map(_varies, arg))
    return isinstance(arg, torch.Tensor | Box | _Map)
