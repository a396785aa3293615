"""A configuration for a problem that no table knows.

Few queries wait for memory: their tile has as many rows as there are queries and enough keys in
flight.  Many queries wait for the matrix units: their tile is as large as registers allow.  How
large that is depends on where the units take their operands from, hence on the kind of GPU.
``tests/compile_matrix.py`` compiles what is chosen for every GPU: it must fit and must not spill.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..device import Device
from ..errors import UnsupportedError, dtype_name
from ..problem import Problem
from .config import KernelConfig, blocks, has_warpgroup_mma, invalid, whole_block

SHORT = 64  # rows up to which a call waits for memory
MANY = 1 << 20


class Tile(NamedTuple):
    rows: int
    keys: int
    warps: int
    stages: int


@functools.lru_cache(maxsize=4096)
def heuristic(problem: Problem, device: Device) -> KernelConfig:
    """The first configuration that fits, from the one that suits best to ever smaller ones."""
    if device.is_interpreter:
        # A tile costs about the same whatever its size: few and large ones.
        rows = max(16, min(128, _power(problem.max_q * problem.group)))
        return KernelConfig(rows, 64, min(problem.group, rows), 4, 1)

    queries = problem.max_q
    if problem.batch_invariant:
        # Nothing that depends on the batch may choose: not the bound on its queries either.
        queries = 1 if problem.is_decode else MANY
    for tile in _smaller(_best(problem, device, queries * problem.group)):
        pack = problem.group if queries < 2 * tile.rows else 1
        config = KernelConfig(tile.rows, tile.keys, min(pack, tile.rows), tile.warps, tile.stages)
        if not invalid(config, problem, device):
            return config
    dims = f"head_dim {problem.head_dim} and values of {problem.head_dim_v}"
    raise UnsupportedError(
        f"{problem.function}: {dims} in {dtype_name(problem.dtype)} need more shared memory than "
        f"{device.title} has ({device.shared_memory} bytes), however small the tile. "
        "Use float16 or bfloat16, or a smaller head_dim."
    )


def _best(problem: Problem, device: Device, rows: int) -> tuple[Tile, ...]:
    """What to try in order; ``rows``: (token, head) pairs that read the same keys."""
    width = max(sum(blocks(problem.head_dim)), whole_block(problem.head_dim_v))
    if problem.dtype == torch.float32:
        return _float32(device, width, rows)
    if device.backend == "hip":
        return (_hip(device, width, rows),)
    # What takes registers beside the products: a tree's look-ups, float8 on its way to 16 bits.
    has_tree, has_fp8 = problem.mask.has_tree, problem.cache_format != ""
    short = rows <= SHORT
    if width > 256:
        tile = Tile(min(32, _tile_rows(rows)), 32, 8, 2)
    elif short:
        warps = 8 if rows > 32 or width > 128 else 4
        tile = Tile(_tile_rows(rows), 32 if has_tree else 64, warps, 4 if width <= 128 else 3)
    elif has_warpgroup_mma(device):
        if has_tree:
            tile = Tile(64, 32, 8, 2)
        elif width <= 64 and device.arch == 90:
            tile = Tile(64, 64, 4, 2)
        else:
            tile = Tile(128, 64, 8, 3 if width <= 128 else 2)
    # Elsewhere queries and scores sit in registers beside the sums.
    elif width <= 64 and not has_tree:
        tile = Tile(64, 64, 4, 3)
    else:
        tile = Tile(64 if width > 128 or has_tree or has_fp8 else 128, 32, 8, 2)
    return (tile,)


def _hip(device: Device, width: int, rows: int) -> Tile:
    if device.warp_size == 32:
        # RDNA's products want each operand twice, in both halves of a warp.
        return Tile(min(64, _tile_rows(rows)), 32 if width <= 64 else 16, 8, 1)
    # With 4 warps, one on each SIMD, a thread may have all of 512 registers.
    if width <= 128:
        return Tile(_tile_rows(rows), 64, 4, 2)
    return Tile(min(64 if width <= 256 else 16, _tile_rows(rows)), 32, 4, 1)


def _float32(device: Device, width: int, rows: int) -> tuple[Tile, ...]:
    if device.backend == "hip":
        return (Tile(16, 16, 4, 1) if device.warp_size == 32 else Tile(min(64, _tile_rows(rows)), 32, 4, 1),)
    # No tensor core multiplies float32 exactly: plain multiplications, unrolled along the dims, and
    # few threads on a large tile spill.
    narrow = (Tile(16, 64, 8, 2), Tile(16, 16, 4, 2))
    if rows <= 16 or width > 128:
        return narrow
    return (Tile(64, 32, 8, 2) if width <= 64 else Tile(64, 64, 16, 2), *narrow)


def _smaller(tiles: tuple[Tile, ...]) -> Iterator[Tile]:
    """Each with fewer and fewer stages, then the last with fewer keys and at last fewer rows."""
    last = tiles[-1]
    rows, keys = last.rows, last.keys
    while rows >= 16:
        for tile in tiles:
            for stages in range(tile.stages, 0, -1):
                yield tile._replace(stages=stages)
        rows, keys = (rows, keys // 2) if keys > 16 else (rows // 2, last.keys)
        tiles = (Tile(rows, keys, last.warps, last.stages),)


def _tile_rows(rows: int) -> int:
    return max(16, min(128, _power(rows)))


def _power(n: int) -> int:
    """The least power of two that is not under n."""
    return 1 << max(0, n - 1).bit_length()
