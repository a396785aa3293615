"""A configuration for a problem that no table knows."""

from __future__ import annotations

import functools

import torch

from ..device import Device
from ..errors import UnsupportedError
from ..problem import Problem
from .config import KernelConfig, blocks, invalid, whole_block


def _power(n: int) -> int:
    """The least power of two that is not under n."""
    return 1 << max(0, n - 1).bit_length()


@functools.lru_cache(maxsize=4096)
def heuristic(problem: Problem, device: Device) -> KernelConfig:
    """Start from what the head dimension and the number of query rows suggest, and shrink until it fits."""
    if device.is_interpreter:
        # A tile costs about the same whatever its size: few and large ones.
        rows = min(128, _power(problem.max_q * problem.group))
        block_m = max(16, min(128, rows))
        return KernelConfig(block_m, 64, min(problem.group, block_m), 4, 1)

    width = max(sum(blocks(problem.head_dim)), whole_block(problem.head_dim_v))
    typical_q = problem.max_q
    if problem.batch_invariant:
        # Nothing that depends on the batch may choose: not the bound on its queries either.
        typical_q = 1 if problem.function == "paged_attention" and problem.max_q == 1 else 1 << 20
    rows = typical_q * problem.group
    wide = problem.dtype == torch.float32
    if rows <= 64:
        block_m = max(16, _power(rows))
        block_n = 64 if width <= 128 else 32 if width <= 256 else 16
        start = KernelConfig(block_m, block_n, problem.group, 4, 3)
    else:
        block_m = 128 if width <= 128 and not wide else 64
        block_n = 64 if width <= 128 else 32
        warps = 8 if block_m == 128 or width > 128 else 4
        pack = problem.group if typical_q < 2 * block_m else 1
        start = KernelConfig(block_m, block_n, min(pack, block_m), warps, 3 if width <= 128 else 2)
    for config in _smaller(start):
        if not invalid(config, problem, device):
            return config
    raise UnsupportedError(
        f"{problem.function}: head_dim {problem.head_dim} in {problem.dtype} needs more shared memory than {device.title} has "
        f"({device.shared_memory} bytes); got no tile that fits. Use float16 or bfloat16, or a smaller head_dim."
    )


def _smaller(config: KernelConfig):
    """The configuration and ever smaller ones: first fewer stages, then fewer keys, then fewer rows."""
    rows, keys = config.block_m, config.block_n
    while rows >= 16:
        while keys >= 16:
            for stages in range(config.num_stages, 0, -1):
                yield KernelConfig(rows, keys, min(config.pack, rows), config.num_warps, stages)
            keys //= 2
        rows, keys = rows // 2, config.block_n
