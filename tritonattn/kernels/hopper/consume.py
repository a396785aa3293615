"""A consumer: one warpgroup, half the rows of each tile of queries.

Values are one tile behind keys: while the tensor cores compute Q K(i) and P V(i - 1), nothing needs
them; then the softmax of tile i is computed while the other warpgroup has them.
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

from .. import softmax
from . import ring, scores
from .load import COLUMNS, swizzled
from .schedule import visible_keys
from .spec import AHEAD as _AHEAD
from .spec import EARLY as _EARLY
from .spec import TURNS as _TURNS

AHEAD = gl.constexpr(_AHEAD)
EARLY = gl.constexpr(_EARLY)
TURNS = gl.constexpr(_TURNS)


@gluon.constexpr_function
def products(columns):
    """Where a warpgroup's products lie: [M, columns] of float32."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.constexpr_function
def stores(rows, columns):
    """Rows stay in their warp, a thread has 8 columns: no barrier, and stores of 16 bytes."""
    wide = [[0, c] for c in (32, 64, 128) if c < columns]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *wide, [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [rows, columns],
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


class Tile(NamedTuple):
    """Of a tile of queries, the key tiles to visit."""

    num_tiles: object
    num_new: object
    top_new: object
    top_old: object
    keep_low: object  # keys that some query of the sequence sees
    keep_high: object
    context: object  # keys in the cache


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
def add_values(p, vs, i, acc, key, tile, bars, SPEC: gl.constexpr):
    """Begin acc + p V for the i-th use of ``vs``, the values of the keys from ``key`` on."""
    ring.wait_full(bars.v_full, i, SPEC.STAGES)
    stage = i % SPEC.STAGES
    high = limit_of(key, tile, SPEC)
    if (key < tile.keep_low) | (key + SPEC.BLOCK_N > high):
        clear_unseen(vs, stage, key, tile.keep_low, high, SPEC)
    return warpgroup_mma(p, vs.index(stage), acc, is_async=True)


@gluon.jit
def begin_products(q, ks, i, bars, SPEC: gl.constexpr):
    """Begin Q K for the i-th use of ``ks``."""
    S: gl.constexpr = products(SPEC.BLOCK_N)
    zero = gl.full([SPEC.BLOCK_M // ring.CONSUMERS, SPEC.BLOCK_N], 0.0, gl.float32, S)
    keys = ks.index(i % SPEC.STAGES).permute((1, 0))
    return warpgroup_mma(q, keys, zero, use_acc=False, is_async=True)


@gluon.jit
def rescale(acc, alpha):
    LAYOUT: gl.constexpr = acc.type.layout
    return acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, LAYOUT)), 1)


@gluon.jit
def attend(
    P: gl.constexpr,
    qk,
    q,
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
    n = tile.num_tiles
    qk = warpgroup_mma_wait(0, deps=[qk])
    ring.give_back(bars.k_empty, keys % STAGES)
    key = key_of(0, tile, SPEC)
    x = scores.score(qk, rows, key, limit_of(key, tile, SPEC), SPEC)
    row_max, shift, alpha = scores.raise_max(x, row_max, rows, SPEC)
    p = scores.weigh(x, shift, rows, SPEC)
    row_sum = scores.rescale_sums(row_sum, alpha, SPEC) + scores.row_sums(p, SPEC)
    p = gl.convert_layout(p.to(dtype), WEIGHTS)
    keys += 1
    mbarrier.wait(bars.k_full.index(keys % STAGES), (keys // STAGES) & 1, pred=n > 1)
    for i in range(1, n):
        if SPEC.FORM & TURNS:
            turn(False, P)
        qk = begin_products(q, ks, keys, bars, SPEC)
        if SPEC.FORM & AHEAD:
            acc = rescale(acc, alpha)
        sums = add_values(p, vs, keys - 1, acc, key, tile, bars, SPEC)
        if SPEC.FORM & TURNS:
            turn(True, 1 - P)
        qk = warpgroup_mma_wait(1, deps=[qk])
        ring.give_back(bars.k_empty, keys % STAGES)
        key = key_of(i, tile, SPEC)
        x = scores.score(qk, rows, key, limit_of(key, tile, SPEC), SPEC)
        row_max, shift, alpha = scores.raise_max(x, row_max, rows, SPEC)
        if SPEC.FORM & EARLY:
            acc, alpha = warpgroup_mma_wait(0, deps=[sums, alpha])
            ring.give_back(bars.v_empty, (keys - 1) % STAGES)
        w = scores.weigh(x, shift, rows, SPEC)
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


@gluon.jit
def store(P: gl.constexpr, acc, row_max, row_sum, tiles, slot, output, SPEC: gl.constexpr):
    """Write a tile's rows of out and lse."""
    M: gl.constexpr = SPEC.BLOCK_M // ring.CONSUMERS
    O_ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    OUT: gl.constexpr = stores(M, SPEC.BLOCK_DV)
    row_max = gl.convert_layout(row_max, O_ROWS)
    row_sum = gl.convert_layout(row_sum, O_ROWS)
    out, lse = softmax.finish(acc, row_max, row_sum, False)
    token = ring.field(tiles, slot, ring.TOKEN, 4) + P * M
    head = ring.field(tiles, slot, ring.HEAD, 4).to(gl.int64)
    rows = ring.field(tiles, slot, ring.ROWS, 4) - P * M
    # Added to what is the same for every tile, a zero that the compiler cannot see through: held
    # in registers all through the loops, that would not leave enough of them.
    zero = (rows + P * M) >> 30
    if SPEC.HAS_LSE:
        offs = zero + gl.arange(0, M, O_ROWS)
        lses = output.lse + head * output.stride_lse_head + token
        gl.store(lses + offs, lse, mask=offs < rows)
    out = gl.convert_layout(out.to(output.ptr.dtype.element_ty), OUT)
    offs = zero + gl.arange(0, M, gl.SliceLayout(1, OUT))
    cols = gl.arange(0, SPEC.BLOCK_DV, gl.SliceLayout(0, OUT))
    start = output.ptr + token.to(gl.int64) * output.stride_token + head * output.stride_head
    ptrs = start + gl.expand_dims(offs * output.stride_token, 1) + gl.expand_dims(cols, 0)
    if SPEC.OUT_ALIGNED:
        ptrs = gl.multiple_of(ptrs, (16, 16))
    inside = gl.expand_dims(offs < rows, 1)
    if SPEC.BLOCK_DV > SPEC.HEAD_DIM_V:
        inside = inside & gl.expand_dims(cols < SPEC.HEAD_DIM_V, 0)
    gl.store(ptrs, out, mask=inside)


@gluon.jit
def read_rows(P: gl.constexpr, tiles, slot, scoring, masking, is_padding, SPEC: gl.constexpr):
    M: gl.constexpr = SPEC.BLOCK_M // ring.CONSUMERS
    ROWS: gl.constexpr = gl.SliceLayout(1, products(SPEC.BLOCK_N))
    offs = P * M + gl.arange(0, M, ROWS)
    pos = ring.field(tiles, slot, ring.POS, 4) + offs
    len_k = ring.field(tiles, slot, ring.LEN_K, 4)
    first, last = visible_keys(pos, len_k, masking, SPEC)
    is_row = offs < ring.field(tiles, slot, ring.ROWS, 4)
    scale = scoring.softmax_scale
    if SPEC.HAS_QUERY_SCALE:
        token = ring.field(tiles, slot, ring.TOKEN, 4) + offs
        scale = gl.load(scoring.query_scale + token, mask=is_row, other=0.0) * scale
    slope = 0.0
    if SPEC.HAS_ALIBI:
        sequence = ring.field(tiles, slot, ring.SEQUENCE, 4)
        head = ring.field(tiles, slot, ring.HEAD, 4).to(gl.int64)
        ptr = scoring.alibi_slopes + head * scoring.stride_alibi_head
        ptr += sequence.to(gl.int64) * scoring.stride_alibi_seq
        slope = gl.load(ptr, mask=~is_padding, other=0.0).to(gl.float32)
    full_low = ring.field(tiles, slot, ring.FULL_LOW, 4)
    full_high = ring.field(tiles, slot, ring.FULL_HIGH, 4)
    return scores.rows_of(
        pos, is_row, first, last, full_low, full_high, scale, scoring.softcap, slope, SPEC
    )


@gluon.jit
def begin_tile(P: gl.constexpr, count, keys, qs, ks, tiles, bars, SPEC: gl.constexpr):
    """How many key tiles the next tile of queries has, and its first product, begun; that is one of
    anything where there is no tile."""
    ring.wait_full(bars.tile_full, count, ring.SLOTS)
    n = ring.field(tiles, count % ring.SLOTS, ring.NUM_TILES, 4)
    i = (count % SPEC.Q_SLOTS) * ring.CONSUMERS + P
    stage = keys % SPEC.STAGES
    mbarrier.wait(bars.q_full.index(i), (count // SPEC.Q_SLOTS) & 1, pred=n > 0)
    mbarrier.wait(bars.k_full.index(stage), (keys // SPEC.STAGES) & 1, pred=n > 0)
    return n, begin_products(qs.index(i), ks, keys, bars, SPEC)


@gluon.jit
def consume(
    P: gl.constexpr, scoring, masking, output, num_seqs, qs, ks, vs, tiles, bars, SPEC: gl.constexpr
):
    """A consumer's whole work; P is its number."""
    M: gl.constexpr = SPEC.BLOCK_M // ring.CONSUMERS
    SUMS: gl.constexpr = products(SPEC.BLOCK_DV)
    ROWS: gl.constexpr = gl.SliceLayout(1, products(SPEC.BLOCK_N))
    if SPEC.FORM & TURNS:
        if P == 1:
            turn(True, 0)
    count = 0  # tiles of queries
    keys = 0  # tiles of keys
    n, qk = begin_tile(P, 0, 0, qs, ks, tiles, bars, SPEC)
    qk = warpgroup_mma_wait(1, deps=[qk])  # which waits for nothing yet
    while n > 0:
        slot = count % ring.SLOTS
        tile = Tile(
            n,
            ring.field(tiles, slot, ring.NUM_NEW, 4),
            ring.field(tiles, slot, ring.TOP_NEW, 4),
            ring.field(tiles, slot, ring.TOP_OLD, 4),
            ring.field(tiles, slot, ring.KEEP_LOW, 4),
            ring.field(tiles, slot, ring.KEEP_HIGH, 4),
            ring.field(tiles, slot, ring.CONTEXT, 4),
        )
        row_max = gl.full([M], float("-inf"), gl.float32, ROWS)
        row_sum = scores.no_sums(row_max, SPEC)
        is_padding = ring.field(tiles, slot, ring.SEQUENCE, 4) >= num_seqs
        if SPEC.HAS_SINK:
            head = ring.field(tiles, slot, ring.HEAD, 4).to(gl.int64)
            sink = gl.load(scoring.sinks + head * scoring.stride_sinks).to(gl.float32)
            sink = gl.where(is_padding, float("-inf"), sink)
            row_max, row_sum = scores.with_sink(sink, row_max, row_sum, SPEC)
        acc = gl.full([M, SPEC.BLOCK_DV], 0.0, gl.float32, SUMS)
        rows = read_rows(P, tiles, slot, scoring, masking, is_padding, SPEC)
        q = qs.index((count % SPEC.Q_SLOTS) * ring.CONSUMERS + P)
        acc, row_max, row_sum, p, key, keys = attend(
            P, qk, q, ks, vs, tile, rows, acc, row_max, row_sum, keys, bars, SPEC
        )
        ring.give_back(bars.q_empty, count % SPEC.Q_SLOTS)
        sums = add_values(p, vs, keys - 1, acc, key, tile, bars, SPEC)
        # The next tile's first product begins before this one's end.
        count += 1
        n, qk = begin_tile(P, count, keys, qs, ks, tiles, bars, SPEC)
        acc, qk = warpgroup_mma_wait(1, deps=[sums, qk])
        ring.give_back(bars.v_empty, (keys - 1) % SPEC.STAGES)
        row_sum = scores.whole_sums(row_sum, ROWS, SPEC)
        store(P, acc, row_max, row_sum, tiles, slot, output, SPEC)
        ring.give_back(bars.tile_empty, slot)
    warpgroup_mma_wait(0, deps=[qk])
    if SPEC.FORM & TURNS:
        if P == 0:
            turn(False, 0)
