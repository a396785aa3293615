"""The card's own limits, measured in the same run as what is judged by them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .timing import Clock, Run

READ_BYTES = 2 << 30
MATMUL_SIZE = 8192


@dataclass(frozen=True)
class Ceilings:
    """``read`` and ``copy`` in TB/s (a copy's bytes counted twice), ``matmul`` in bf16 TFLOP/s."""

    read: float
    copy: float
    matmul: float

    def floor_us(self, num_bytes: int, flops: int) -> float:
        """Microseconds that no version can beat by much: reading, or computing, the longer."""
        return max(num_bytes / self.read, flops / self.matmul) / 1e6


def measure_ceilings(clock: Clock, device: torch.device, runs: int = 20) -> Ceilings:
    """Sustained rates, medians of ``runs`` after a warm-up; the best of several ways to read."""
    reads = [_rate(clock, READ_BYTES, make, device, runs) for make in (_sum, _read)]
    copy = _rate(clock, 2 * READ_BYTES, _copy, device, runs)
    matmul = _rate(clock, 2 * MATMUL_SIZE**3, _matmul, device, 2 * runs)
    return Ceilings(max(reads), copy, matmul)


def _rate(
    clock: Clock, work: int, make: Callable[[torch.device], Run], device: torch.device, runs: int
) -> float:
    """``work`` in units of 1e12 a second."""
    run = make(device)
    run()
    warm = max(3, runs // 4)
    return work / statistics.median(clock.device_time(run, warm + runs)[warm:]) / 1e6


def _buffer(device: torch.device) -> torch.Tensor:
    return torch.randint(-1000, 1000, (READ_BYTES // 4,), dtype=torch.int32, device=device)


def _sum(device: torch.device) -> Run:
    return torch.randn(READ_BYTES // 4, device=device).sum


def _read(device: torch.device) -> Run:
    from .read_kernel import read_kernel

    x, block = _buffer(device), 8192
    programs = 4 * torch.cuda.get_device_properties(device).multi_processor_count
    out = torch.empty(programs * block, dtype=torch.int32, device=device)
    return lambda: read_kernel[(programs,)](x, out, x.numel() // block, BLOCK=block, num_warps=8)


def _copy(device: torch.device) -> Run:
    source = _buffer(device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _matmul(device: torch.device) -> Run:
    shape = (MATMUL_SIZE, MATMUL_SIZE)
    a, b = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.matmul(a, b, out=out)
