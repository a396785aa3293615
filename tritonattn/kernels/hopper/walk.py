"""A consumer's walk over the key tiles of a tile of queries.

Values are one tile behind keys: the tensor cores compute Q K(i) and P V(i - 1) together, of which
only the first is waited for; the second and what the other consumer has begun run while the softmax
of tile i is computed.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import ring, scores
from .ring import COLUMNS, swizzled
from .spec import AHEAD as _AHEAD
from .spec import EARLY as _EARLY
from .spec import TURNS as _TURNS

AHEAD = gl.constexpr(_AHEAD)
EARLY = gl.constexpr(_EARLY)
TURNS = gl.constexpr(_TURNS)


class Tile(NamedTuple):
    """Of a tile of queries, the key tiles to visit."""

    num_tiles: object
    num_new: object
    top_new: object
    top_old: object
    keep_low: object  # keys that some query of the sequence sees
    keep_high: object
    context: object  # keys in the cache


@gluon.constexpr_function
def products(columns):
    """Where a warpgroup's products lie: [M, columns] of float32."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def turn(GIVE: gl.constexpr, OF: gl.constexpr):
    """Wait for a consumer's turn at the tensor cores, or give it."""
    BAR: gl.constexpr = 13 + OF
    OP: gl.constexpr = "bar.arrive" if GIVE else "bar.sync"
    gl.inline_asm_elementwise(
        OP + " $1, 256; mov.b32 $0, $1;", "=r,r", [gl.to_tensor(BAR)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def clear_unseen(vs, stage, key, low, high, SPEC: gl.constexpr):
    """Zero the values of keys outside low..high in a tile: 0 x NaN would reach the sums."""
    STRIPS: gl.constexpr = SPEC.BLOCK_DV // COLUMNS
    PARTS: gl.constexpr = SPEC.BLOCK_N // 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    parts = ring.view_as(vs, vs.dtype, [SPEC.STAGES * STRIPS * PARTS, 16, COLUMNS], swizzled(2))
    offs = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
    for part in range(PARTS):
        begin = key + part * 16
        if (begin < low) | (begin + 16 > high):
            is_seen = gl.expand_dims((begin + offs >= low) & (begin + offs < high), 1)
            for strip in gl.static_range(STRIPS):
                rows = parts.index((stage * STRIPS + strip) * PARTS + part)
                rows.store(gl.where(is_seen, rows.load(LAYOUT), 0.0))
    fence_async_shared()
    ring.barrier()


@gluon.jit
def key_of(i, tile, SPEC: gl.constexpr):
    """The first key of the i-th key tile to visit."""
    if SPEC.HAS_CACHE and SPEC.HAS_NEW:
        old = tile.top_old - (i - tile.num_new) * SPEC.BLOCK_N
        return gl.where(i < tile.num_new, tile.top_new - i * SPEC.BLOCK_N, old)
    elif SPEC.HAS_NEW:
        return tile.top_new - i * SPEC.BLOCK_N
    else:
        return tile.top_old - i * SPEC.BLOCK_N


@gluon.jit
def limit_of(key, tile, SPEC: gl.constexpr):
    """Where the keys of a key tile's source end."""
    if SPEC.HAS_CACHE and SPEC.HAS_NEW:
        return gl.where(key < tile.context, tile.context, tile.keep_high)
    else:
        return tile.keep_high


@gluon.jit
def begin_products(qs, part, ks, i, SPEC: gl.constexpr):
    """Begin Q K of part ``part`` of ``qs`` and the i-th use of ``ks``."""
    M: gl.constexpr = SPEC.BLOCK_M // ring.CONSUMERS
    PARTS: gl.constexpr = SPEC.Q_SLOTS * ring.CONSUMERS
    zero = gl.full([M, SPEC.BLOCK_N], 0.0, gl.float32, products(SPEC.BLOCK_N))
    stage = i % SPEC.STAGES
    q = ring.main_of(qs, part, M, PARTS, SPEC.BLOCK_D)
    k = ring.main_of(ks, stage, SPEC.BLOCK_N, SPEC.STAGES, SPEC.BLOCK_D)
    qk = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if ring.main_part(SPEC.BLOCK_D) < SPEC.BLOCK_D:
        q = ring.rest_of(qs, part, PARTS, SPEC.BLOCK_D)
        k = ring.rest_of(ks, stage, SPEC.STAGES, SPEC.BLOCK_D)
        qk = warpgroup_mma(q, k.permute((1, 0)), qk, is_async=True)
    return qk


@gluon.jit
def rescale(acc, alpha):
    LAYOUT: gl.constexpr = acc.type.layout
    return acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, LAYOUT)), 1)


@gluon.jit
def add_values(p, vs, i, acc, key, tile, bars, SPEC: gl.constexpr):
    """Begin acc + p V for the i-th use of ``vs``, the values of the keys from ``key`` on."""
    ring.wait_full(bars.v_full, i, SPEC.STAGES)
    stage = i % SPEC.STAGES
    high = limit_of(key, tile, SPEC)
    if (key < tile.keep_low) | (key + SPEC.BLOCK_N > high):
        clear_unseen(vs, stage, key, tile.keep_low, high, SPEC)
    values = ring.main_of(vs, stage, SPEC.BLOCK_N, SPEC.STAGES, SPEC.BLOCK_DV)
    return warpgroup_mma(p, values, acc, is_async=True)


@gluon.jit
def attend(
    P: gl.constexpr,
    qk,
    qs,
    part,
    ks,
    vs,
    tile,
    rows,
    acc,
    row_max,
    row_sum,
    keys,
    bars,
    SPEC: gl.constexpr,
):
    """All key tiles of a tile of queries but the last one's values; ``keys`` is the first one's
    use of ``ks``, whose product ``qk`` has begun."""
    STAGES: gl.constexpr = SPEC.STAGES
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    dtype: gl.constexpr = ks.dtype
    IS_ROUGH: gl.constexpr = dtype == gl.bfloat16
    n = tile.num_tiles
    qk = warpgroup_mma_wait(0, deps=[qk])
    ring.give_back(bars.k_empty, keys % STAGES)
    key = key_of(0, tile, SPEC)
    x = scores.score(qk, rows, key, limit_of(key, tile, SPEC), IS_ROUGH, SPEC)
    row_max, shift, alpha = scores.raise_max(x, row_max, rows, key, SPEC)
    p = scores.weigh(x, shift, rows, IS_ROUGH, SPEC)
    row_sum = scores.rescale_sums(row_sum, alpha, SPEC) + scores.row_sums(p, SPEC)
    p = gl.convert_layout(p.to(dtype), WEIGHTS)
    keys += 1
    mbarrier.wait(bars.k_full.index(keys % STAGES), (keys // STAGES) & 1, pred=n > 1)
    for i in range(1, n):
        if SPEC.FORM & TURNS:
            turn(False, P)
        qk = begin_products(qs, part, ks, keys, SPEC)
        if SPEC.FORM & AHEAD:
            acc = rescale(acc, alpha)
        sums = add_values(p, vs, keys - 1, acc, key, tile, bars, SPEC)
        if SPEC.FORM & TURNS:
            turn(True, 1 - P)
        qk = warpgroup_mma_wait(1, deps=[qk])
        ring.give_back(bars.k_empty, keys % STAGES)
        key = key_of(i, tile, SPEC)
        x = scores.score(qk, rows, key, limit_of(key, tile, SPEC), IS_ROUGH, SPEC)
        row_max, shift, alpha = scores.raise_max(x, row_max, rows, key, SPEC)
        if SPEC.FORM & EARLY:
            acc, alpha = warpgroup_mma_wait(0, deps=[sums, alpha])
            ring.give_back(bars.v_empty, (keys - 1) % STAGES)
        w = scores.weigh(x, shift, rows, IS_ROUGH, SPEC)
        row_sum = scores.rescale_sums(row_sum, alpha, SPEC) + scores.row_sums(w, SPEC)
        w = gl.convert_layout(w.to(dtype), WEIGHTS)
        keys += 1
        # Unless EARLY, this ends a basic block, and so keeps ptxas from waiting for P V before the
        # exponentials.
        mbarrier.wait(bars.k_full.index(keys % STAGES), (keys // STAGES) & 1, pred=i + 1 < n)
        if SPEC.FORM & EARLY:
            p = w
        else:
            acc, p, alpha, row_sum = warpgroup_mma_wait(0, deps=[sums, w, alpha, row_sum])
            ring.give_back(bars.v_empty, (keys - 2) % STAGES)
        if not SPEC.FORM & AHEAD:
            acc = rescale(acc, alpha)
    if SPEC.FORM & AHEAD:
        acc = rescale(acc, alpha)
    return acc, row_max, row_sum, p, key, keys
