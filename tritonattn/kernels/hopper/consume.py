"""A consumer: one warpgroup, half the rows of each tile of queries."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from .. import softmax
from . import ring, scores
from .products import begin_scores, products, turn
from .schedule import visible_keys
from .walk import TURNS, Tile, add_values, attend


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
    scale = scoring.softmax_scale
    if SPEC.HAS_QUERY_SCALE:
        is_row = offs < ring.field(tiles, slot, ring.ROWS, 4)
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
        pos, first, last, full_low, full_high, scale, scoring.softcap, slope, SPEC
    )


@gluon.jit
def judge(P: gl.constexpr, row_max, row_sum, rows, tiles, slot, failed, bars):
    """Tell the scheduler whether a row's weights were too large, or vanished, or may be wrong."""
    offs = P * row_sum.shape[0] + gl.arange(0, row_sum.shape[0], row_sum.type.layout)
    is_row = (offs < ring.field(tiles, slot, ring.ROWS, 4)) & (rows.first < rows.last)
    is_right = (row_sum > 0.0) & (row_sum < float("inf"))  # NaN is not
    is_right = is_right & (gl.abs(row_max) < scores.HUGE)
    is_first_time = ring.field(tiles, slot, ring.FULL_LOW, 4) < ring.NONE
    has_failed = is_row & ~is_right & is_first_time
    failed.index(slot * ring.CONSUMERS + P).store(has_failed.to(gl.int32))
    mbarrier.arrive(bars.tile_judged.index(slot), count=1)


@gluon.jit
def begin_tile(P: gl.constexpr, count, keys, qs, ks, tiles, bars, SPEC: gl.constexpr):
    """How many key tiles the next tile of queries has, and its first product, begun; that is one of
    anything where there is no tile."""
    ring.wait_full(bars.tile_full, count, ring.SLOTS)
    n = ring.field(tiles, ring.place(count, ring.SLOTS), ring.NUM_TILES, 4)
    i = ring.place(count, SPEC.Q_SLOTS) * ring.CONSUMERS + P
    mbarrier.wait(bars.q_full.index(i), ring.phase(count, SPEC.Q_SLOTS), pred=n > 0)
    stage = ring.place(keys, SPEC.STAGES)
    mbarrier.wait(bars.k_full.index(stage), ring.phase(keys, SPEC.STAGES), pred=n > 0)
    return n, begin_scores(qs, i, ks, stage, SPEC)


@gluon.jit
def consume(
    P: gl.constexpr, scoring, masking, output, num_seqs, qs, ks, vs, tiles, failed, bars,
    SPEC: gl.constexpr,
):  # fmt: skip
    """A consumer's whole work; P is its number."""
    M: gl.constexpr = SPEC.BLOCK_M // ring.CONSUMERS
    SUMS: gl.constexpr = products(SPEC.BLOCK_DV)
    ROWS: gl.constexpr = gl.SliceLayout(1, products(SPEC.BLOCK_N))
    if SPEC.FORM & TURNS and P == 1:
        turn(True, 0)
    count = 0  # tiles of queries
    keys = 0  # tiles of keys
    n, qk = begin_tile(P, 0, 0, qs, ks, tiles, bars, SPEC)
    qk = warpgroup_mma_wait(1, deps=[qk])  # which waits for nothing yet
    while n > 0:
        slot = ring.place(count, ring.SLOTS)
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
        part = ring.place(count, SPEC.Q_SLOTS) * ring.CONSUMERS + P
        sums, keys = attend(
            P, qk, qs, part, ks, vs, tile, rows, acc, row_max, row_sum, keys, bars, SPEC
        )
        ring.give_back(bars.q_empty, ring.place(count, SPEC.Q_SLOTS))
        stage = ring.place(keys - 1, SPEC.STAGES)
        phase = ring.phase(keys - 1, SPEC.STAGES)
        acc = add_values(sums, vs, stage, phase, tile, bars, False, SPEC)
        row_sum = scores.whole_sums(sums.row_sum, ROWS, SPEC)
        judge(P, sums.row_max, row_sum, rows, tiles, slot, failed, bars)
        # The next tile's first product begins before this one's end.
        count += 1
        n, qk = begin_tile(P, count, keys, qs, ks, tiles, bars, SPEC)
        acc, qk = warpgroup_mma_wait(1, deps=[acc, qk])
        ring.give_back(bars.v_empty, stage)
        store(P, acc, sums.row_max, row_sum, tiles, slot, output, SPEC)
        ring.give_back(bars.tile_empty, slot)
    warpgroup_mma_wait(0, deps=[qk])
    if SPEC.FORM & TURNS and P == 0:
        turn(False, 0)
