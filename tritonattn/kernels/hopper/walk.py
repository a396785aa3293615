"""A consumer's walk over the key tiles of a tile of queries.

Values are one tile behind keys: the tensor cores compute Q K(i) and P V(i - 1) together, of which
only the first is waited for; the second and what the other consumer has begun run while the softmax
of tile i is computed.

Every instruction between the products shows.  So tiles that all queries see whole, which are most
of many, have a loop of their own: without masks, and without a look at their maximum.  Weights are
measured from the maximum of the tiles before, and a score must be larger by far to make one too
large.  That a row's sum shows in the end (consume.judge); the scheduler then announces the tile of
queries once more, as if no keys were seen by all.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from . import ring, scores
from .products import (
    begin_scores,
    begin_values,
    clear_unseen,
    halves,
    operand,
    rescale,
    turn,
)
from .spec import MID as _MID
from .spec import TURNS as _TURNS

MID = gl.constexpr(_MID)
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


class Sums(NamedTuple):
    """What the key tiles so far come to; the last one's values are yet to be added."""

    acc: object  # [M, BLOCK_DV]
    row_max: object
    row_sum: object
    p: object  # the last tile's weights; if MID, those of the first half of its keys
    rest: object  # and of the other half
    key: object  # the last tile's first key


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
def is_clean(key, tile, SPEC: gl.constexpr):
    """Whether all values of a key tile may be multiplied."""
    return (key >= tile.keep_low) & (key + SPEC.BLOCK_N <= limit_of(key, tile, SPEC))


@gluon.jit
def make_clean(vs, stage, key, tile, SPEC: gl.constexpr):
    if not is_clean(key, tile, SPEC):
        clear_unseen(vs, stage, key, tile.keep_low, limit_of(key, tile, SPEC), SPEC)


@gluon.jit
def plain_tiles(i, last_key, tile, rows, SPEC: gl.constexpr):
    """How many key tiles from the i-th on all rows see whole, of which each has a maximum, as it
    sees a key behind them; none where the values of the one before, that of ``last_key``, must be
    cleared."""
    key = key_of(i, tile, SPEC)
    low = gl.maximum(rows.full_low, tile.keep_low)
    high = gl.minimum(rows.full_high - 1, limit_of(key, tile, SPEC))
    count = gl.minimum((key - low) // SPEC.BLOCK_N + 1, tile.num_tiles - i)
    if SPEC.HAS_CACHE and SPEC.HAS_NEW:
        count = gl.where(i < tile.num_new, gl.minimum(count, tile.num_new - i), count)
    is_plain = (key >= low) & (key + SPEC.BLOCK_N <= high) & is_clean(last_key, tile, SPEC)
    return gl.where(is_plain, count, 0)


@gluon.jit
def add_values(
    sums, vs, stage, phase, tile, bars, IS_CLEAN: gl.constexpr, SPEC: gl.constexpr
):  # fmt: skip
    """Begin to add the last tile's values, in ``stage`` of ``vs``."""
    mbarrier.wait(bars.v_full.index(stage), phase)
    if not IS_CLEAN:
        make_clean(vs, stage, sums.key, tile, SPEC)
    return begin_values(sums.p, sums.rest, vs, stage, sums.acc, SPEC)


@gluon.jit
def first_tile(qk, tile, rows, acc, row_max, row_sum, SPEC: gl.constexpr, dtype: gl.constexpr):
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    key = key_of(0, tile, SPEC)
    x = scores.score(qk, rows, key, limit_of(key, tile, SPEC), False, dtype == gl.bfloat16, SPEC)
    row_max, shift, alpha = scores.raise_max(x, row_max, rows, key, dtype, SPEC)
    w = scores.weigh(x, shift, rows, False, SPEC)
    row_sum = scores.rescale_sums(row_sum, alpha, SPEC) + scores.row_sums(w, SPEC)
    rest = 0
    if SPEC.FORM & MID:
        a, b = halves(w)
        p = operand(a, dtype, WEIGHTS)
        rest = operand(b, dtype, WEIGHTS)
    else:
        p = gl.convert_layout(w.to(dtype), WEIGHTS)
    return Sums(acc, row_max, row_sum, p, rest, key)


@gluon.jit
def next_tile(
    P: gl.constexpr, sums, qs, part, ks, vs, tile, rows, key,
    v_stage, v_phase, stage, next_stage, next_phase, has_next, bars,
    IS_PLAIN: gl.constexpr, SPEC: gl.constexpr,
):  # fmt: skip
    """Add the last tile's values, in ``v_stage``, and weigh the keys from ``key`` on, which are in
    ``stage``.  ``next_stage`` is waited for, if there is a next tile."""
    dtype: gl.constexpr = ks.dtype
    LAYOUT: gl.constexpr = sums.acc.type.layout
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2)
    if SPEC.FORM & TURNS:
        turn(False, P)
    qk = begin_scores(qs, part, ks, stage, SPEC)
    acc = add_values(sums, vs, v_stage, v_phase, tile, bars, IS_PLAIN, SPEC)
    if SPEC.FORM & TURNS:
        turn(True, 1 - P)
    qk = warpgroup_mma_wait(2 if SPEC.FORM & MID else 1, deps=[qk])
    ring.give_back(bars.k_empty, stage)
    limit = limit_of(key, tile, SPEC)
    x = scores.score(qk, rows, key, limit, IS_PLAIN, dtype == gl.bfloat16, SPEC)
    row_max, row_sum = sums.row_max, sums.row_sum
    if IS_PLAIN:
        shift = scores.shift_of(row_max, rows, key, SPEC)
        alpha = shift  # which nothing takes
    else:
        row_max, shift, alpha = scores.raise_max(x, row_max, rows, key, dtype, SPEC)
        row_sum = scores.rescale_sums(row_sum, alpha, SPEC)
    rest = 0
    # The wait for the next keys ends a basic block, and so keeps ptxas from waiting for P V before
    # the exponentials that stand before it.
    if SPEC.FORM & MID:
        a, b = halves(x)
        shift = gl.convert_layout(shift, gl.SliceLayout(1, a.type.layout), assert_trivial=True)
        a = scores.weigh(a, shift, rows, IS_PLAIN, SPEC)
        row_sum += scores.row_sums_like(row_sum, a, SPEC)
        mbarrier.wait(bars.k_full.index(next_stage), next_phase, pred=has_next)
        acc, a, b, alpha, row_sum = warpgroup_mma_wait(0, deps=[acc, a, b, alpha, row_sum])
        ring.give_back(bars.v_empty, v_stage)
        if not IS_PLAIN:
            acc = rescale(acc, alpha)
        b = scores.weigh(b, shift, rows, IS_PLAIN, SPEC)
        row_sum += scores.row_sums_like(row_sum, b, SPEC)
        p = operand(a, dtype, WEIGHTS)
        rest = operand(b, dtype, WEIGHTS)
    else:
        w = scores.weigh(x, shift, rows, IS_PLAIN, SPEC)
        row_sum += scores.row_sums(w, SPEC)
        p = gl.convert_layout(w.to(dtype), WEIGHTS)
        mbarrier.wait(bars.k_full.index(next_stage), next_phase, pred=has_next)
        acc, p, alpha, row_sum = warpgroup_mma_wait(0, deps=[acc, p, alpha, row_sum])
        ring.give_back(bars.v_empty, v_stage)
        if not IS_PLAIN:
            acc = rescale(acc, alpha)
    return Sums(acc, row_max, row_sum, p, rest, key)


@gluon.jit
def attend(
    P: gl.constexpr, qk, qs, part, ks, vs, tile, rows, acc, row_max, row_sum, uses, bars,
    SPEC: gl.constexpr,
):  # fmt: skip
    """All key tiles of a tile of queries but the last one's values.  ``uses`` is the first one's
    use of ``ks``, whose product ``qk`` has begun; returned is that of the next tile of queries."""
    STAGES: gl.constexpr = SPEC.STAGES
    n = tile.num_tiles
    stage, phase = ring.place(uses, STAGES), ring.phase(uses, STAGES)
    qk = warpgroup_mma_wait(0, deps=[qk])
    ring.give_back(bars.k_empty, stage)
    sums = first_tile(qk, tile, rows, acc, row_max, row_sum, SPEC, ks.dtype)
    next_stage, next_phase = ring.following(stage, phase, STAGES)
    mbarrier.wait(bars.k_full.index(next_stage), next_phase, pred=n > 1)
    i = 1
    while i < n:
        count = plain_tiles(i, sums.key, tile, rows, SPEC)
        for j in range(i, i + count):
            v_stage, v_phase = stage, phase
            stage, phase = ring.following(v_stage, v_phase, STAGES)
            next_stage, next_phase = ring.following(stage, phase, STAGES)
            sums = next_tile(
                P, sums, qs, part, ks, vs, tile, rows, key_of(j, tile, SPEC),
                v_stage, v_phase, stage, next_stage, next_phase, j + 1 < n, bars, True, SPEC,
            )  # fmt: skip
        i += count
        if count > 0:
            row_sum = scores.marked(sums.row_sum, sums.row_max, ks.dtype, SPEC)
            sums = Sums(sums.acc, sums.row_max, row_sum, sums.p, sums.rest, sums.key)
        else:
            v_stage, v_phase = stage, phase
            stage, phase = ring.following(v_stage, v_phase, STAGES)
            next_stage, next_phase = ring.following(stage, phase, STAGES)
            sums = next_tile(
                P, sums, qs, part, ks, vs, tile, rows, key_of(i, tile, SPEC),
                v_stage, v_phase, stage, next_stage, next_phase, i + 1 < n, bars, False, SPEC,
            )  # fmt: skip
            i += 1
    return sums, uses + n
