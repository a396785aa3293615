"""Memory for partial results: one buffer a thread, GPU and stream, shared by all eager calls there.

One thread's calls on one stream run one after another, so they can share it.  A graph may be
replayed on another stream, beside eager calls and other graphs, so what is captured gets memory of
its own from the graph.
"""

from __future__ import annotations

import threading

import torch
import triton

_LIMIT = 1 << 24  # float32 numbers, 64 MiB; what is larger goes back to torch after each call

_buffers: dict[tuple[int, int, int], torch.Tensor] = {}


def take(like: torch.Tensor, numel: int) -> torch.Tensor:
    """At least ``numel`` float32 where ``like`` is, for the next kernels of its stream alone."""
    index = like.get_device()
    if index < 0 or numel > _LIMIT or torch.cuda.is_current_stream_capturing():
        return like.new_empty(numel, dtype=torch.float32)
    stream = triton.runtime.driver.active.get_current_stream(index)
    key = (threading.get_ident(), index, stream)
    buffer = _buffers.get(key)
    if buffer is None or buffer.numel() < numel:
        # A power of two, so that a growing batch seldom replaces it.
        size = 1 << (numel - 1).bit_length()
        _buffers[key] = buffer = like.new_empty(size, dtype=torch.float32)
    return buffer
