"""Memory for partial results: one buffer a thread, GPU and stream, shared by all eager calls there.

One thread's calls on one stream run one after another, so they can share it.  A graph may be
replayed on another stream, beside eager calls and other graphs, so what is captured gets memory of
its own.  So do compiled programs: they run in a graph's memory before they are captured, and
nothing of that may be kept.
"""

from __future__ import annotations

import threading

import torch

from . import device as devices

_LIMIT = 1 << 24  # float32 numbers, 64 MiB; what is larger goes back to torch after each call
_COUNTERS = 1 << 22  # int32 numbers that all calls on a GPU draw from, 16 MiB


class Place:
    """Where calls run, with the memory that they share there."""

    __slots__ = ("buffer", "counters", "index", "is_captured")

    def __init__(self, index: int, is_captured: bool) -> None:
        self.index = index  # of the GPU; -1: on a CPU
        self.is_captured = is_captured
        self.buffer: torch.Tensor | None = None
        self.counters: torch.Tensor | None = None


NOWHERE = Place(-1, False)

_places: dict[tuple[int, int, int], Place] = {}  # by thread, GPU and stream
# By GPU: the counters that nothing has been given yet, and when all of them are zero.
_pools: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}
_lock = threading.Lock()


def place_of(like: torch.Tensor) -> Place:
    """Of calls with ``like``, one of their tensors."""
    index = like.get_device()
    return NOWHERE if index < 0 else place_at(index, devices.stream_of(index))


def place_at(index: int, stream: int) -> Place:
    """Of calls on a GPU's current stream."""
    if devices.is_capturing():
        return Place(index, True)
    key = threading.get_ident(), index, stream
    place = _places.get(key)
    if place is None:
        place = _places[key] = Place(index, False)
    return place


def take(place: Place, like: torch.Tensor, numel: int, *, shared: bool = True) -> torch.Tensor:
    """At least ``numel`` float32 where ``like`` is, for the next kernels of its stream alone."""
    buffer = place.buffer
    if shared and buffer is not None and numel <= buffer.numel():
        return buffer
    if not shared or place is NOWHERE or numel > _LIMIT or place.is_captured:
        return like.new_empty(numel, dtype=torch.float32)
    # A power of two, so that a growing batch seldom replaces it.
    size = 1 << (numel - 1).bit_length()
    place.buffer = buffer = like.new_empty(size, dtype=torch.float32)
    return buffer


def take_counters(
    place: Place, like: torch.Tensor, numel: int, *, shared: bool = True
) -> torch.Tensor:
    """At least ``numel`` int32 zeros where ``like`` is, for kernels that leave them at zero.

    Once an eager call has made a pool of them, neither graphs nor compiled programs have to clear
    any: a captured call keeps its own for good, an eager one its stream's.
    """
    counters = place.counters
    if counters is not None and numel <= counters.numel():
        return counters
    if place is NOWHERE:
        return like.new_zeros(numel, dtype=torch.int32)
    index, is_capturing = place.index, place.is_captured
    with _lock:
        found = _pools.get(index)
        if found is None and shared and not is_capturing:
            pool = torch.zeros(_COUNTERS, dtype=torch.int32, device=like.device)
            found = pool, torch.cuda.current_stream(index).record_event()
        if found is None or found[0].numel() < numel:
            return like.new_zeros(numel, dtype=torch.int32)
        pool, is_zero = found
        counters, _pools[index] = pool[:numel], (pool[-(-numel // 32) * 32 :], is_zero)
    if not is_capturing:  # a capture has waited for all streams before it began
        torch.cuda.current_stream(index).wait_event(is_zero)
        place.counters = counters
    return counters
