"""Which configurations the tuner tries, and how a table's entry is fitted to a call.

``config.invalid`` is the one rule of what can run; nothing here repeats it.
"""

from __future__ import annotations

import dataclasses
import itertools

from ..console import count
from ..device import Device
from ..plan import HOPPER, plan
from ..problem import Problem
from .config import (
    HOPPER_FORMS,
    KernelConfig,
    blocks,
    has_few_rows,
    invalid,
    whole_block,
    why_no_boxes,
)
from .heuristics import heuristic, portable
from .keys import family_of, log2

# What has won on an H200, or was within a percent of what did.
DEPTHS = (2, 4, 5)  # stages: behind a look-up of page ids, 3 is what 4 is, and 6 what 5 is
FEW_ROWS_DEPTHS = (2, 3, 4)  # where page ids are looked up a tile ahead
A_WARPS = (1536, 5120)  # numbers of a key tile for each warp, where few queries wait for memory
ROWS_A_WARP = 16


def candidates(problem: Problem, device: Device, exhaustive: bool = False) -> list[KernelConfig]:
    """The valid ones, the heuristic's own choice first; those that may win, or all."""
    found = _valid(_tried(problem, device), problem, device)
    if exhaustive or device.backend != "cuda":
        return found
    return [c for c in found if c == found[0] or _is_likely(c, problem, device, found)]


def _is_likely(
    config: KernelConfig, problem: Problem, device: Device, all_: list[KernelConfig]
) -> bool:
    if config.kernel == HOPPER:
        # Keys in flight hide what copying them takes: as many as there is room for.
        rivals = [c for c in all_ if c.kernel == HOPPER and c.block_n == config.block_n]
        if config.num_stages < max(c.num_stages for c in rivals):
            return False
        usual = next(c for c in all_ if c.kernel == HOPPER)
        if config.block_n == usual.block_n:
            return True
        return config.block_n > usual.block_n or config.form == usual.form
    width = max(
        sum(blocks(problem.head_dim, problem.dtype, device)), whole_block(problem.head_dim_v)
    )
    if family_of(problem) != "decode" and problem.group * problem.max_q > 64:
        # One of 64 rows for four warps, which multiply together; heads this wide have few anyway.
        is_even = config.block_m == ROWS_A_WARP * config.num_warps and config.num_stages < 4
        return is_even or width > 256
    least, most = A_WARPS
    fits = least <= config.block_n * width // config.num_warps <= most
    depths = FEW_ROWS_DEPTHS if has_few_rows(config, problem) else DEPTHS
    return fits and config.num_stages in depths


def _tried(problem: Problem, device: Device) -> list[KernelConfig]:
    width = max(
        sum(blocks(problem.head_dim, problem.dtype, device)), whole_block(problem.head_dim_v)
    )
    family = family_of(problem)
    rows = problem.group * (1 if family == "decode" else problem.max_q)
    if problem.batch_invariant and family != "decode":
        rows = 1 << 20  # a bound on the queries depends on the batch
    least = max(16, 1 << log2(rows))
    is_long = rows > 64
    if family == "decode":
        heights = [m for m in (16, 32, 64, 128) if m <= least]
    else:
        heights = [64, 128] if is_long else [m for m in (least // 2, least) if m >= 16]
    lengths = (32, 64, 128) if width <= 256 else (16, 32, 64)
    warps: tuple[int, ...] = (4, 8) if is_long else (2, 4, 8)
    stages: tuple[int, ...] = (2, 3, 4) if is_long else (2, 3, 4, 5, 6)
    if device.backend == "hip" or (isinstance(device.arch, int) and device.arch < 80):
        stages = (1, 2)  # no asynchronous copies to have more of in flight
    packs = {1, problem.group} if is_long and family != "decode" else {problem.group}

    tried = [heuristic(problem, device)]
    if plan(problem, device).kernel == HOPPER:
        forms = [form for form in HOPPER_FORMS if "lanes" in form]  # nothing else has paid yet
        for n, s, form in itertools.product((64, 128), (2, 3, 4), forms):
            tried.append(KernelConfig(128, n, 1, 4, s, form, HOPPER))
        tried.append(portable(problem, device))
        return tried
    if is_long and not why_no_boxes(problem, device):
        # With the usual pack alone, and without the deepest pipelines: they would double all this.
        for m, n, w, s in itertools.product(heights, lengths, warps, stages[:2]):
            pack = min(m, problem.group if problem.max_q < 2 * m else 1)
            tried.append(KernelConfig(m, n, pack, w, s, "boxes"))
    for m, n, w, s, p in itertools.product(heights, lengths, warps, stages, sorted(packs)):
        tried.append(KernelConfig(m, n, min(p, m), w, s))
    return tried


def _valid(tried: list[KernelConfig], problem: Problem, device: Device) -> list[KernelConfig]:
    unique = list(dict.fromkeys(tried))
    return [config for config in unique if not invalid(config, problem, device)]


def fit(config: KernelConfig, problem: Problem, device: Device) -> KernelConfig | None:
    """A table's entry as this call can run it; None: not at all.

    An entry speaks for a class of groups, where a pack above 1 means as many heads as fit; one from
    a GPU with more shared memory gives up stages, and boxes where they cannot be had.
    """
    if config.kernel == HOPPER:
        serves = plan(problem, device).kernel == HOPPER and not invalid(config, problem, device)
        return config if serves else None
    pack = 1 if config.pack == 1 else min(problem.group, config.block_m)
    form = KernelConfig.form if why_no_boxes(problem, device) else config.form
    for stages in range(config.num_stages, 0, -1):
        fitted = dataclasses.replace(config, pack=pack, num_stages=stages, form=form)
        if not invalid(fitted, problem, device):
            return fitted
    return None


def describe(config: KernelConfig) -> str:
    """``64 x 32 tile, 4 heads packed, 4 warps, 3 stages, boxes``."""
    if config.kernel == HOPPER:
        size = f"{config.block_m} x {config.block_n}"
        stages = count(config.num_stages, "stage")
        return f"Hopper's kernel, {size} tile, {stages}, {config.form}"
    packed = f"{config.pack} heads packed, " if config.pack > 1 else ""
    warps, stages = count(config.num_warps, "warp"), count(config.num_stages, "stage")
    form = f", {config.form}" if config.form != KernelConfig.form else ""
    return f"{config.block_m} x {config.block_n} tile, {packed}{warps}, {stages}{form}"
