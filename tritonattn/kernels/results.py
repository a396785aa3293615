"""What a program does with the rows of a tile that it is done with."""

import triton
import triton.language as tl

from .softmax import power
from .tiles import store_tile, tile_rows

GROUP = 16  # pieces
PER_GROUP: tl.constexpr = tl.constexpr(GROUP)


@triton.jit
def store_tile_rows(rows, acc, row_ok, SPEC):
    store_tile(rows, acc, row_ok, 0, SPEC.BLOCK_DV, SPEC.HEAD_DIM_V, SPEC.ALIGNED, SPEC.INTERPRETED)


@triton.jit
def store_part(partials, acc, lse, part, token, head, row_ok, SPEC):
    part = part.to(tl.int64)
    rows = partials.ptr + part * partials.stride_part + head * partials.stride_head
    store_tile_rows(rows + token.to(tl.int64) * partials.stride_token, acc, row_ok, SPEC)
    lses = partials.lse + part * partials.stride_lse_part + head * partials.stride_lse_head
    tl.store(lses + token, lse, mask=row_ok)


@triton.jit
def store_whole(output, acc, lse, token, head, row_ok, SPEC):
    rows = output.ptr + token.to(tl.int64) * output.stride_token + head * output.stride_head
    store_tile_rows(rows, acc, row_ok, SPEC)
    if SPEC.HAS_LSE:
        tl.store(output.lse + head * output.stride_lse_head + token, lse, mask=row_ok)


@triton.jit
def store_rows(output, partials, acc, lse, part, parts, token, head, row_ok, SPEC):
    """A tile's rows of out and lse, or of one of their parts; ``token`` counts over the batch."""
    if part == 0:
        counts = partials.counts + head * partials.stride_lse_head + token
        tl.store(counts, tl.zeros_like(token) + parts, mask=row_ok)
    if parts > 1:
        store_part(partials, acc, lse, part, token, head, row_ok, SPEC)
    else:
        store_whole(output, acc, lse, token, head, row_ok, SPEC)


@triton.jit
def rows_to_store(place, q_start, len_q, num_kv_heads, ROWS: tl.constexpr, SPEC):
    """(token, head, whether there is such a row) of the first ROWS of a tile."""
    # From a zero that the compiler cannot see through: what only the end needs would otherwise hold
    # a dozen registers all through the loops.
    offs_m = tl.arange(0, ROWS) + (num_kv_heads >> 30)
    offs_q, head, row_ok = tile_rows(
        offs_m, place.tile, len_q, place.head_block, place.kv_head, SPEC
    )
    return q_start + offs_q, head, row_ok


@triton.jit
def store_share(shares, output, out, lse, place, piece, q_start, len_q, num_kv_heads, SPEC):
    """A tile's rows, or one piece of them, of which the last program to get there merges all.

    Many are merged by groups first, side by side, then the groups: reading takes time.
    """
    token, head, row_ok = rows_to_store(place, q_start, len_q, num_kv_heads, SPEC.BLOCK_M, SPEC)
    first = piece.first
    if piece.parts == 1:
        store_whole(output, out, lse, token, head, row_ok, SPEC)
    else:
        store_slot(shares, first + piece.part, out, lse, row_ok, SPEC.BLOCK_M, SPEC)
        if SPEC.SHARE_ROWS * SPEC.BLOCK_DV > 2048 or piece.parts <= PER_GROUP:
            if arrive(shares.arrivals + first, piece.parts):
                store_merged(
                    shares, output, first, piece.parts, 1, place, q_start, len_q, num_kv_heads, SPEC
                )
        else:
            group = first + piece.part // PER_GROUP * PER_GROUP
            members = tl.minimum(PER_GROUP, first + piece.parts - group)
            if arrive(shares.arrivals + group, members):
                merged, merged_lse = merge_slots(shares, group, members, 1, SPEC)
                rows = tl.arange(0, SPEC.SHARE_ROWS)
                store_slot(shares, group, merged, merged_lse, rows >= 0, SPEC.SHARE_ROWS, SPEC)
                count = tl.cdiv(piece.parts, PER_GROUP)
                if arrive(shares.arrivals + first + 1, count):  # no group's own counter
                    store_merged(
                        shares, output, first, count, PER_GROUP, place, q_start, len_q,
                        num_kv_heads, SPEC,
                    )  # fmt: skip


@triton.jit
def store_merged(
    shares, output, first, count, STEP: tl.constexpr, place, q_start, len_q, num_kv_heads, SPEC
):
    merged, merged_lse = merge_slots(shares, first, count, STEP, SPEC)
    token, head, row_ok = rows_to_store(place, q_start, len_q, num_kv_heads, SPEC.SHARE_ROWS, SPEC)
    store_whole(output, merged, merged_lse, token, head, row_ok, SPEC)


@triton.jit
def store_slot(shares, slot, out, lse, row_ok, ROWS: tl.constexpr, SPEC):
    """One partial result, ``out`` [ROWS, BLOCK_DV] and ``lse`` [ROWS]."""
    rows = slot * SPEC.BLOCK_M + tl.arange(0, ROWS)
    cells = rows[:, None] * SPEC.BLOCK_DV + tl.arange(0, SPEC.BLOCK_DV)[None, :]
    tl.store(tl.multiple_of(shares.ptr + cells, (16, 16)), out, mask=row_ok[:, None])
    tl.store(shares.lse + rows, lse, mask=row_ok)


@triton.jit
def arrive(counter, count):
    """Whether this is the last of ``count`` programs to come here; it finds what all have
    stored."""
    tl.debug_barrier()  # all of this program's stores come before its arrival
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def merge_slots(shares, first, count, STEP: tl.constexpr, SPEC):
    """(out [SHARE_ROWS, BLOCK_DV], lse [SHARE_ROWS]) of every STEP-th of the slots from ``first``
    on, in their order."""
    # One query a sequence fills as many rows as there are heads in a tile.
    ROWS: tl.constexpr = SPEC.SHARE_ROWS
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, SPEC.BLOCK_DV], tl.float32)
    for start in tl.range(0, count, SPEC.SHARE_STEP):
        row_max, row_sum, acc = add_slots(
            row_max, row_sum, acc, shares, first, start, count, STEP, SPEC
        )
    is_empty = row_sum == 0.0
    divisor = tl.where(is_empty, 1.0, row_sum)
    out = tl.math.div_rn(acc, tl.broadcast_to(divisor[:, None], acc.shape))
    lse = tl.where(is_empty, float("-inf"), row_max + tl.log(divisor))
    return out, lse


@triton.jit
def add_slots(row_max, row_sum, acc, shares, first, start, count, STEP, SPEC):
    """SHARE_STEP slots from number ``start`` on, all of them on their way before the first is
    added."""
    rows = tl.arange(0, SPEC.SHARE_ROWS)
    lses = ()
    outs = ()
    for i in tl.static_range(SPEC.SHARE_STEP):
        row = (first + (start + i) * STEP) * SPEC.BLOCK_M + rows
        cell = row[:, None] * SPEC.BLOCK_DV + tl.arange(0, SPEC.BLOCK_DV)[None, :]
        is_there = rows * 0 + start + i < count
        # Other programs wrote them: not from this multiprocessor's own cache.
        lse = tl.load(shares.lse + row, mask=is_there, other=float("-inf"), cache_modifier=".cg")
        ptrs = tl.multiple_of(shares.ptr + cell, (16, 16))
        out = tl.load(ptrs, mask=is_there[:, None], other=0.0, cache_modifier=".cg")
        lses += (lse,)
        outs += (out,)
    m_new = row_max
    for i in tl.static_range(SPEC.SHARE_STEP):
        m_new = tl.maximum(m_new, lses[i])
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = power(row_max - shift, True)
    row_sum *= alpha
    acc *= alpha[:, None]
    for i in tl.static_range(SPEC.SHARE_STEP):
        weight = power(lses[i] - shift, True)
        row_sum += weight
        acc = tl.fma(outs[i], tl.broadcast_to(weight[:, None], acc.shape), acc)
    return m_new, row_sum, acc
