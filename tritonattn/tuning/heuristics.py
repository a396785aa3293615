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

from ..device import Device, target
from ..errors import UnsupportedError, dtype_name
from ..plan import HOPPER, LONG, plan
from ..problem import Problem
from .config import (
    KernelConfig,
    blocks,
    has_tensor_cores,
    has_warpgroup_mma,
    invalid,
    reads_values_as_keys,
    unfit_for_hopper,
    whole_block,
    why_no_boxes,
)

SHORT = 64  # rows up to which a call waits for memory
MANY = 1 << 20
TWO_WIDE_TILES = 200_000  # of 64 latent keys of 576 dims, beside the queries
LARGE_MEMORY = 150_000  # bytes of shared memory from which two deep pipelines fit a multiprocessor


class Tile(NamedTuple):
    rows: int
    keys: int
    warps: int
    stages: int
    form: str = KernelConfig.form


@functools.lru_cache(maxsize=4096)
def heuristic(problem: Problem, device: Device) -> KernelConfig:
    if plan(problem, device).kernel == HOPPER:
        return hopper(problem)
    return portable(problem, device)


def portable(problem: Problem, device: Device) -> KernelConfig:
    """The first configuration that fits, from the one that suits best to ever smaller ones."""
    queries = problem.max_q
    if problem.batch_invariant:
        # Nothing that depends on the batch may choose: not the bound on its queries either.
        queries = 1 if problem.is_decode else MANY
    if device.is_interpreter:
        # A tile costs about the same whatever its size: few and large ones.
        rows = max(16, min(128, _power(queries * problem.group)))
        return KernelConfig(rows, 64, min(problem.group, rows), 4, 1)

    for tile in _smaller(_best(problem, device, queries * problem.group)):
        # A few long sequences beside many short ones: tiles of the short ones would be empty.
        is_short = queries < 2 * tile.rows or problem.total_q <= SHORT * problem.batch
        pack = problem.group if is_short and queries < MANY else 1
        config = KernelConfig(
            tile.rows, tile.keys, min(pack, tile.rows), tile.warps, tile.stages, tile.form
        )
        if not invalid(config, problem, device):
            return config
    way_out = "float16 or bfloat16, or " if problem.dtype == torch.float32 else ""
    raise UnsupportedError(
        f"{problem.function}: head_dim {problem.head_dim} and values of {problem.head_dim_v} in "
        f"{dtype_name(problem.dtype)} need more shared memory than {device.title} has "
        f"({device.shared_memory} bytes), however small the tile. Use {way_out}smaller heads."
    )


def hopper(problem: Problem) -> KernelConfig:
    """As large a tile as registers allow, and as many keys in flight as there is room for."""
    gpu = target(90)
    form = _order(problem)
    if not problem.batch_invariant:
        is_new = not problem.has_cache
        # Long tiles leave gaps at the end if they are dealt out; of short ones each drawing shows.
        if not is_new or problem.total_q >= LONG * problem.batch:
            form += "+drawn"
    # A cap and a bias together take more registers than there are beside so many scores.
    is_heavy = problem.has_softcap and problem.has_alibi
    is_heavy &= 64 < whole_block(problem.head_dim_v) <= 128
    tried = (
        KernelConfig(128, keys, 1, 4, stages, form, HOPPER)
        for keys in ((64,) if is_heavy else (128, 64))
        for stages in (4, 3, 2)
    )
    return next(config for config in tried if not unfit_for_hopper(config, problem, gpu))


def _order(problem: Problem) -> str:
    """The switches that say when a consumer does what, as they measured best on an H200."""
    width = whole_block(problem.head_dim_v)
    if width > 128:
        return "lanes"
    is_bare = not (problem.has_softcap or problem.has_alibi)
    return "lanes+mid" if problem.has_cache and is_bare and width > 64 else "turns+lanes"


def _best(problem: Problem, device: Device, rows: int) -> Tile:
    """``rows``: (token, head) pairs that read the same keys."""
    width = max(
        sum(blocks(problem.head_dim, problem.dtype, device)), whole_block(problem.head_dim_v)
    )
    if device.backend == "hip":
        return _hip(problem, device, width, rows)
    if problem.dtype == torch.float32 or not has_tensor_cores(device):
        return _plain(problem, device, width, rows)
    # What takes registers beside the products: a tree's look-ups, float8 on its way to 16 bits,
    # keys that are read a number at a time, a second block of a head's dims.
    has_tree, has_fp8 = problem.mask.has_tree, problem.cache_format != ""
    is_heavy = has_fp8 or len(blocks(problem.head_dim, problem.dtype, device)) > 1
    has_room = device.shared_memory > LARGE_MEMORY
    if width > 256:
        if reads_values_as_keys(problem, device) and not has_tree:
            return _latent(problem, device, rows)
        if rows <= 16 and has_room and not has_tree and not has_fp8:
            return Tile(16, 32, 4, 2)
        return Tile(_up_to(32, rows), 32, 8, 2)
    has_halves = (
        has_warpgroup_mma(device) and len(blocks(problem.head_dim, problem.dtype, device)) > 1
    )
    if has_tree:
        most = 32 if has_fp8 or has_halves else 64
        return Tile(_up_to(most, rows), 32, 8 if rows > 16 else 4, 3)
    if rows <= 32 and problem.has_cache:
        return _few(problem, device, width, rows)
    if rows <= SHORT:
        keys = 32 if has_fp8 and not device.has_native_e4m3 else 64
        return Tile(_up_to(64, rows), keys, 8 if width >= 256 else 4, 4 if width <= 128 else 3)
    if not problem.rows_aligned:
        return Tile(32, 32, 4, 3) if has_halves else Tile(64, 32, 8, 3)
    form = KernelConfig.form if why_no_boxes(problem, device) else "boxes"
    if width <= 64:
        return Tile(64, 64, 4, 3 if device.arch == 90 else 2, form)
    # Warpgroups take operands from shared memory, other warps from their registers.
    if width <= 128 and device.arch == 90 and not is_heavy:
        return Tile(64, 64, 4, 3, form)  # two blocks beside each other
    if width <= 128:
        return Tile(128, 32 if is_heavy and not has_warpgroup_mma(device) else 64, 8, 3, form)
    if device.arch == 90:  # boxes spill there: their masked values pass through registers
        form = KernelConfig.form
    return Tile(128 if has_warpgroup_mma(device) else 64, 64, 8, 2, form)


def _few(problem: Problem, device: Device, width: int, rows: int) -> Tile:
    """Few rows over cached keys, as they measured best on an H200: enough loads in flight, in
    several blocks beside each other; or in few, of which there are few parts to merge."""
    has_fp8 = problem.cache_format != ""
    has_room = device.shared_memory > LARGE_MEMORY
    is_cut = not (problem.batch_invariant or problem.num_splits)
    is_small = is_cut and 4 * problem.batch * problem.num_kv_heads <= device.sm_count
    warps, keys, stages = 8 if width >= 256 else 4, 64, 2
    if has_fp8:
        keys = 128 if width <= 64 else 64
        stages = 3 if has_room and rows <= 16 and 64 < width <= 128 else 2
        if not device.has_native_e4m3:
            keys, stages = keys // 2, 2
    elif has_room and width == 256:
        keys, stages = 32, 3
    elif has_room and width <= 128:
        if rows > 16:
            keys, stages = 128 if problem.is_decode else 64, 3
        elif width <= 64 or is_small:
            keys, stages = 128, 3
    elif width <= 64:
        keys = 128
    return Tile(_up_to(32, rows), keys, warps, stages)


def _latent(problem: Problem, device: Device, rows: int) -> Tile:
    """Heads of 576 dims, of which 512 are the values too: a tile or two of keys on their way, and
    no fewer keys a warp than its product takes, which are multiplied many times over else.  Small
    tiles, two blocks beside each other, as they measured best on an H200 with many sequences."""
    has_fp8, rows = problem.cache_format != "", _up_to(32, rows)
    if has_fp8 and not device.has_native_e4m3:
        return Tile(rows, 32, 8, 2)
    if has_fp8 or device.shared_memory > TWO_WIDE_TILES:
        is_many = rows <= 16 and 8 * problem.batch >= device.sm_count
        return Tile(rows, 32, 4, 3) if is_many and not has_fp8 else Tile(rows, 64, 8, 3)
    return Tile(rows, 32, 8 if rows > 16 else 4, 4)


def _hip(problem: Problem, device: Device, width: int, rows: int) -> Tile:
    is_float32 = problem.dtype == torch.float32
    if device.warp_size == 32:
        # RDNA's products want each operand twice, in both halves of a warp.
        if is_float32:
            return Tile(16, 16, 16, 1)
        if width <= 64:
            return Tile(_up_to(64, rows), 32, 8, 1)
        is_heavy = width > 128 or (problem.mask.has_tree and problem.cache_format != "")
        return Tile(_up_to(16 if is_heavy else 32, rows), 16, 8, 1)
    # With 4 warps, one on each SIMD, a thread may have all of 512 registers.
    if width > 256:
        return Tile(16, 16, 4, 1)
    if is_float32 or width > 128:
        return Tile(_up_to(64, rows), 32, 4, 1)
    return Tile(_up_to(128, rows), 64, 4, 2)


def _plain(problem: Problem, device: Device, width: int, rows: int) -> Tile:
    """Without tensor cores, which do not multiply float32 exactly.  Multiplications are unrolled
    along the dims, so that few threads on a large tile spill."""
    if not has_tensor_cores(device):
        is_heavy = problem.mask.has_tree or problem.has_cache
        return Tile(16, 16, 8, 1) if is_heavy else Tile(_up_to(32, rows), 32, 8, 1)
    if rows <= 16:
        return Tile(16, 32 if width <= 128 else 16, 8, 2 if problem.has_cache else 3)
    if width <= 64 or (width <= 128 and has_warpgroup_mma(device)):
        return Tile(64, 32, 8, 2)
    return Tile(16, 64 if width <= 128 else 32, 8, 2)


def _smaller(tile: Tile) -> Iterator[Tile]:
    """The tile and ever smaller ones: first fewer stages, then fewer keys, then fewer rows."""
    rows, keys = tile.rows, tile.keys
    while rows >= 16:
        while keys >= 16:
            for stages in range(tile.stages, 0, -1):
                yield Tile(rows, keys, tile.warps, stages, tile.form)
            keys //= 2
        rows, keys = rows // 2, tile.keys


def _up_to(most: int, rows: int) -> int:
    return max(16, min(most, _power(rows)))


def _power(n: int) -> int:
    """The least power of two that is not under n."""
    return 1 << max(0, n - 1).bit_length()
