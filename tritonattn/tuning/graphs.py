"""Capturing calls in a CUDA graph, many times in a row."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


def capture(
    calls: Sequence[Callable[[], Any]], stream: torch.cuda.Stream, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """A graph of these calls, made and first replayed on ``stream``; raises what they raise.

    Not by ``torch.cuda.graph``, which collects garbage and gives memory back each time: more work
    than most of what is timed.
    """
    device = stream.device
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), _no_garbage():
        calls[0]()  # what is made at a first use on this stream is made outside the graph
        torch.cuda.synchronize(device)
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        except BaseException:
            with contextlib.suppress(Exception):
                graph.capture_end()
            raise
        graph.capture_end()
        graph.replay()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    return graph


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """A graph that is collected during a capture would end it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
