"""What the bench asks of the GPU: its facts, its clock, its memory."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ..tuning.graphs import capture
from .timing import Run

FALLBACK_L2 = 64 << 20  # bytes, where torch does not tell


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class GpuClock:
    """Times the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device)

    def capture(self, calls: Sequence[Run]) -> Run:
        return capture(calls, self.side).replay

    def device_time(self, run: Run, times: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        events[-1].synchronize()
        return [before.elapsed_time(after) * 1e3 for before, after in pairwise(events)]

    def host_time(self, calls: Sequence[Run]) -> tuple[float, float]:
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for call in calls:
            call()
        issued = time.perf_counter()
        torch.cuda.synchronize(self.device)
        return (issued - start) * 1e6, (time.perf_counter() - start) * 1e6


@dataclass(frozen=True)
class Facts:
    """The card: sizes in bytes."""

    name: str
    arch: str
    sm_count: int
    memory: int
    l2: int


def facts(device: torch.device) -> Facts:
    found = torch.cuda.get_device_properties(device)
    arch = getattr(found, "gcnArchName", "") or ""
    if not torch.version.hip:
        arch = f"sm_{found.major}{found.minor}"
    l2 = getattr(found, "L2_cache_size", 0) or FALLBACK_L2
    return Facts(found.name, arch, found.multi_processor_count, found.total_memory, l2)


def versions() -> dict[str, Any]:
    """Of what the figures depend on besides the card."""
    import triton

    from .. import __version__

    toolkit = {"hip": torch.version.hip} if torch.version.hip else {"cuda": torch.version.cuda}
    return {
        "tritonattn": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        **toolkit,
        "python": platform.python_version(),
    }


class LostError(RuntimeError):
    """The GPU cannot be used any more in this process; ``culprit`` broke it, "" if unknown."""

    def __init__(self, message: str, culprit: str = "") -> None:
        super().__init__(message, culprit)  # what a copy in another process is made of
        self.message, self.culprit = message, culprit

    def __str__(self) -> str:
        return self.message


def ensure_alive(device: torch.device) -> None:
    """Raises LostError where something has broken the GPU's context."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise LostError(str(error).strip().splitlines()[0]) from error


def free_memory() -> None:
    """Give back what nothing holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
