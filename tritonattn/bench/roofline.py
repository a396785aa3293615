"""The card's own limits, measured in the same run as what is judged by them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch

from .gpu import Facts
from .timing import Clock, Run

READ_BYTES = 2 << 30  # or an eighth of a small card's memory
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


def measure_ceilings(clock: Clock, device: torch.device, card: Facts) -> Ceilings:
    """Sustained rates, medians after a warm-up; the best of several ways to read."""
    words = min(READ_BYTES, card.memory // 8) // 4
    # Not torch's default generator: a capture that failed may have left it unusable.
    how: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
    x = torch.randn(words, **how)
    y = torch.empty_like(x)
    reads = [_rate(clock, x.nbytes, run, 40) for run in (x.sum, _reader(x, card))]
    copy = _rate(clock, 2 * x.nbytes, lambda: y.copy_(x), 40)
    shape = (MATMUL_SIZE, MATMUL_SIZE)
    a, b = (torch.randn(shape, dtype=torch.bfloat16, **how) for _ in range(2))
    c = torch.empty_like(a)
    matmul = _rate(clock, 2 * MATMUL_SIZE**3, lambda: torch.matmul(a, b, out=c), 200)
    return Ceilings(max(reads), copy, matmul)


def _rate(clock: Clock, work: int, run: Run, runs: int) -> float:
    """``work`` in units of 1e12 a second."""
    run()
    return work / statistics.median(clock.device_time(run, 2 * runs)[runs:]) / 1e6


def _reader(x: torch.Tensor, card: Facts) -> Run:
    from .read_kernel import read_kernel

    words, block, programs = x.view(torch.int32), 8192, 4 * card.sm_count
    out = torch.empty(programs * block, dtype=torch.int32, device=x.device)
    tiles = words.numel() // block
    return lambda: read_kernel[(programs,)](words, out, tiles, BLOCK=block, num_warps=8)
