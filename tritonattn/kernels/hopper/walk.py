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
from .spec import MID as _MID
from .spec import UNROLLED as _UNROLLED
from .spec import TURNS as _TURNS

AHEAD = gl.constexpr(_AHEAD)
MID = gl.constexpr(_MID)
UNROLLED = gl.constexpr(_UNROLLED)
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
    stage = ring.place(i, SPEC.STAGES)
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
def add_values(
    p, p2, vs, stage, phase, acc, key, tile, bars, IS_CLEAN: gl.constexpr, SPEC: gl.constexpr
):
    """Begin acc + p V for the values in ``stage``, those of the keys from ``key`` on, which need no
    clearing if IS_CLEAN."""
    mbarrier.wait(bars.v_full.index(stage), phase)
    if not IS_CLEAN:
        high = limit_of(key, tile, SPEC)
        if (key < tile.keep_low) | (key + SPEC.BLOCK_N > high):
            clear_unseen(vs, stage, key, tile.keep_low, high, SPEC)
    values = ring.main_of(vs, stage, SPEC.BLOCK_N, SPEC.STAGES, SPEC.BLOCK_DV)
    if SPEC.FORM & MID:
        H: gl.constexpr = SPEC.BLOCK_N // 2
        acc = warpgroup_mma(p, values.slice(0, H), acc, is_async=True)
        return warpgroup_mma(p2, values.slice(H, H), acc, is_async=True)
    else:
        return warpgroup_mma(p, values, acc, is_async=True)


@gluon.jit
def plain_tiles(i, last_key, tile, rows, SPEC: gl.constexpr):
    """How many tiles from the i-th on are followed by another one and seen whole by every row;
    none unless the tile before, of the keys from ``last_key`` on, has no values to clear."""
    key = key_of(i, tile, SPEC)
    limit = limit_of(key, tile, SPEC)
    low = gl.maximum(rows.full_low, tile.keep_low)
    last_limit = limit_of(last_key, tile, SPEC)
    is_clean = (last_key >= tile.keep_low) & (last_key + SPEC.BLOCK_N <= last_limit)
    is_seen = (key >= low) & (key + SPEC.BLOCK_N <= gl.minimum(rows.full_high, limit))
    count = gl.minimum((key - low) // SPEC.BLOCK_N + 1, tile.num_tiles - 1 - i)
    if SPEC.HAS_CACHE and SPEC.HAS_NEW:
        count = gl.where(i < tile.num_new, gl.minimum(count, tile.num_new - i), count)
    return gl.where(is_clean & is_seen, count, 0)


@gluon.jit
def narrow(x, dtype: gl.constexpr):
    """x in 16 bits, two neighbours at a time."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def halves(x):
    """Of [M, N], the first and the last N / 2 columns."""
    x = gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2])
    return gl.split(gl.permute(x, [0, 2, 1]))


@gluon.jit
def step(
    P: gl.constexpr, qs, part, ks, vs, tile, rows, acc, row_max, row_sum, p, p2, alpha,
    last_key, key, v_stage, v_phase, stage, next_stage, next_phase, has_next, bars,
    IS_PLAIN: gl.constexpr, SPEC: gl.constexpr,
):  # fmt: skip
    """The scores of a tile of keys, and the values of the one before."""
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    IS_ROUGH: gl.constexpr = ks.dtype == gl.bfloat16
    if SPEC.FORM & TURNS:
        turn(False, P)
    qk = begin_products(qs, part, ks, stage, SPEC)
    if SPEC.FORM & AHEAD:
        acc = rescale(acc, alpha)
    sums = add_values(p, p2, vs, v_stage, v_phase, acc, last_key, tile, bars, IS_PLAIN, SPEC)
    if SPEC.FORM & TURNS:
        turn(True, 1 - P)
    qk = warpgroup_mma_wait(2 if SPEC.FORM & MID else 1, deps=[qk])
    ring.give_back(bars.k_empty, stage)
    x = scores.score(qk, rows, key, limit_of(key, tile, SPEC), IS_PLAIN, IS_ROUGH, SPEC)
    row_max, shift, alpha = scores.raise_max(x, row_max, rows, key, SPEC)
    row_sum = scores.rescale_sums(row_sum, alpha, SPEC)
    if SPEC.FORM & MID:
        a, b = halves(x)
        SIDE: gl.constexpr = gl.SliceLayout(1, a.type.layout)
        side = gl.convert_layout(shift, SIDE, assert_trivial=True)
        a = scores.weigh(a, side, rows, SPEC)
        s = scores.row_sums(a, SPEC)
        row_sum += gl.convert_layout(s, row_sum.type.layout, assert_trivial=True)
        mbarrier.wait(bars.k_full.index(next_stage), next_phase, pred=has_next)
        acc, a, b, alpha, row_sum = warpgroup_mma_wait(0, deps=[sums, a, b, alpha, row_sum])
        ring.give_back(bars.v_empty, v_stage)
        acc = rescale(acc, alpha)
        b = scores.weigh(b, side, rows, SPEC)
        s = scores.row_sums(b, SPEC)
        row_sum += gl.convert_layout(s, row_sum.type.layout, assert_trivial=True)
        p = gl.convert_layout(narrow(a, ks.dtype), WEIGHTS)
        p2 = gl.convert_layout(narrow(b, ks.dtype), WEIGHTS)
    else:
        w = scores.weigh(x, shift, rows, SPEC)
        row_sum += scores.row_sums(w, SPEC)
        w = gl.convert_layout(w.to(ks.dtype), WEIGHTS)
        # This ends a basic block, and so keeps ptxas from waiting for P V before the exponentials.
        mbarrier.wait(bars.k_full.index(next_stage), next_phase, pred=has_next)
        acc, p, alpha, row_sum = warpgroup_mma_wait(0, deps=[sums, w, alpha, row_sum])
        ring.give_back(bars.v_empty, v_stage)
        if not SPEC.FORM & AHEAD:
            acc = rescale(acc, alpha)
    return acc, row_max, row_sum, p, p2, alpha


@gluon.jit
def attend(
    P: gl.constexpr, qk, qs, part, ks, vs, tile, rows, acc, row_max, row_sum, keys, bars,
    SPEC: gl.constexpr,
):  # fmt: skip
    """All key tiles of a tile of queries but the last one's values; ``keys`` is the first one's
    use of ``ks``, whose product ``qk`` has begun."""
    STAGES: gl.constexpr = SPEC.STAGES
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    dtype: gl.constexpr = ks.dtype
    IS_ROUGH: gl.constexpr = dtype == gl.bfloat16
    n = tile.num_tiles
    qk = warpgroup_mma_wait(0, deps=[qk])
    ring.give_back(bars.k_empty, ring.place(keys, STAGES))
    key = key_of(0, tile, SPEC)
    x = scores.score(qk, rows, key, limit_of(key, tile, SPEC), False, IS_ROUGH, SPEC)
    row_max, shift, alpha = scores.raise_max(x, row_max, rows, key, SPEC)
    p = scores.weigh(x, shift, rows, SPEC)
    row_sum = scores.rescale_sums(row_sum, alpha, SPEC) + scores.row_sums(p, SPEC)
    p2 = 0
    if SPEC.FORM & MID:
        a, b = halves(p)
        p = gl.convert_layout(narrow(a, dtype), WEIGHTS)
        p2 = gl.convert_layout(narrow(b, dtype), WEIGHTS)
    else:
        p = gl.convert_layout(p.to(dtype), WEIGHTS)
    keys += 1
    stage = ring.place(keys, STAGES)
    mbarrier.wait(bars.k_full.index(stage), ring.phase(keys, STAGES), pred=n > 1)
    i = 1
    while i < n:
        if SPEC.FORM & UNROLLED:
            if ring.place(keys, STAGES) == 0:
                rounds = plain_tiles(i, key, tile, rows, SPEC) // STAGES
                for _ in range(rounds):
                    phase = ring.phase(keys, STAGES)
                    for s in gl.static_range(STAGES):
                        last_key = key
                        key = key_of(i + s, tile, SPEC)
                        acc, row_max, row_sum, p, p2, alpha = step(
                            P, qs, part, ks, vs, tile, rows, acc, row_max, row_sum, p, p2, alpha,
                            last_key, key, (s + STAGES - 1) % STAGES, phase ^ (1 if s == 0 else 0), s,
                            (s + 1) % STAGES, phase ^ (1 if s + 1 == STAGES else 0), True, bars, True, SPEC,
                        )  # fmt: skip
                    i += STAGES
                    keys += STAGES
        else:
            count = plain_tiles(i, key, tile, rows, SPEC)
            v_stage = ring.place(keys - 1, STAGES)
            v_phase = ring.phase(keys - 1, STAGES)
            for j in range(count):
                last_key = key
                key = key_of(i + j, tile, SPEC)
                stage, phase = ring.following(v_stage, v_phase, STAGES)
                next_stage, next_phase = ring.following(stage, phase, STAGES)
                acc, row_max, row_sum, p, p2, alpha = step(
                    P, qs, part, ks, vs, tile, rows, acc, row_max, row_sum, p, p2, alpha,
                    last_key, key, v_stage, v_phase, stage, next_stage, next_phase, True, bars,
                    True, SPEC,
                )  # fmt: skip
                v_stage, v_phase = stage, phase
            i += count
            keys += count
        last_key = key
        key = key_of(i, tile, SPEC)
        acc, row_max, row_sum, p, p2, alpha = step(
            P, qs, part, ks, vs, tile, rows, acc, row_max, row_sum, p, p2, alpha,
            last_key, key, ring.place(keys - 1, STAGES), ring.phase(keys - 1, STAGES),
            ring.place(keys, STAGES), ring.place(keys + 1, STAGES), ring.phase(keys + 1, STAGES),
            i + 1 < n, bars, False, SPEC,
        )  # fmt: skip
        i += 1
        keys += 1
    if SPEC.FORM & AHEAD:
        acc = rescale(acc, alpha)
    return acc, row_max, row_sum, p, p2, key, keys
