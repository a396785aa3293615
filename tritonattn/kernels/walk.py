"""Walking over the keys that a tile of queries sees: where tiles lie, and what each one adds."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import masks, softmax
from .casts import as_loaded, decode, round_to
from .tiles import dot, load_tile, page_slots


class Source(NamedTuple):
    """Keys and values of one sequence and one KV head; key ``first`` is the source's first."""

    k: object
    v: object
    k_stride_token: object
    v_stride_token: object
    k_stride_page: object
    v_stride_page: object  # None: as the keys' strides
    page_ids: object  # None: the rows are packed
    table: object
    first: object


class Queries(NamedTuple):
    """A tile's rows: what they are multiplied with and what they see."""

    q: object  # [BLOCK_M, BLOCK_D]
    q_tail: object  # [BLOCK_M, TAIL_D]
    pos: object  # [BLOCK_M] absolute position
    first: object  # [BLOCK_M] keys first <= j < last are seen; None: all that are visited
    last: object
    slopes: object  # [BLOCK_M]
    softcap: object
    row_ok: object  # [BLOCK_M]
    tree_rows: object  # [BLOCK_M] pointers
    tree: object  # Masking
    first_new: object  # the first key that the tree mask speaks of


@triton.jit
def load_keys(
    row_ptrs,
    ok,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    FORMAT: tl.constexpr,
    like,
    MASKED: tl.constexpr,
    SPEC,
):
    tile = load_tile(row_ptrs, ok, FIRST, BLOCK, DIM, MASKED, SPEC.ALIGNED)
    if FORMAT != "":
        tile = decode(tile, FORMAT, like.dtype, SPEC.NATIVE_FP8)
    return tile


@triton.jit
def visit(
    acc,
    row_max,
    row_sum,
    row_scale,
    rows,
    source,
    begin,
    low,
    high,
    FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
    READ_ALL: tl.constexpr,
    SPEC,
):
    """One tile of keys, ``begin`` onward; MASKED where not every row sees all of low..high in it.

    Nothing outside low..high is read, unless READ_ALL: all of the tile is there to be read.
    """
    offs_n = begin + tl.arange(0, SPEC.BLOCK_N)
    ok = (offs_n >= low) & (offs_n < high)
    visible = tl.broadcast_to(ok[None, :], (SPEC.BLOCK_M, SPEC.BLOCK_N))
    if MASKED:
        if rows.first is not None:
            visible = visible & masks.is_visible(offs_n, rows.first, rows.last)
        if SPEC.HAS_TREE:
            visible = visible & masks.is_visible_in_tree(
                offs_n, rows.first_new, rows.tree_rows, rows.row_ok,
                rows.tree.tree_width, rows.tree.stride_tree_col,
            )  # fmt: skip
            # A key that no row sees may hold anything: 0 x NaN would reach the sum.
            ok = ok & (tl.max((visible & rows.row_ok[:, None]).to(tl.int32), 0) > 0)

    if source.page_ids is not None:
        page, slot = page_slots(source.page_ids, source.table, offs_n, ok, SPEC.PAGE_SIZE, not READ_ALL)
        at = page * source.k_stride_page + slot * source.k_stride_token
        k_rows = source.k + at
        if source.v_stride_page is not None:
            at = page * source.v_stride_page + slot * source.v_stride_token
        v_rows = source.v + at
    else:
        token = (offs_n - source.first).to(tl.int64)
        k_rows = source.k + token * source.k_stride_token
        v_rows = source.v + token * source.v_stride_token

    k = load_keys(k_rows, ok, 0, SPEC.BLOCK_D, SPEC.HEAD_DIM, FORMAT, rows.q, not READ_ALL, SPEC)
    qk = dot(rows.q, tl.trans(k), None, SPEC.INTERPRETED)  # [BLOCK_M, BLOCK_N]
    if SPEC.TAIL_D > 0:
        k_tail = load_keys(
            k_rows, ok, SPEC.BLOCK_D, SPEC.TAIL_D, SPEC.HEAD_DIM, FORMAT, rows.q, not READ_ALL,
            SPEC,
        )
        qk = dot(rows.q_tail, tl.trans(k_tail), qk, SPEC.INTERPRETED)
    v = load_keys(
        v_rows, ok, 0, SPEC.BLOCK_DV, SPEC.HEAD_DIM_V, FORMAT, rows.q, not READ_ALL, SPEC
    )

    if FORMAT != "" and SPEC.NATIVE_FP8 and v.dtype != tl.float32:
        v = as_loaded(v, offs_n)

    # float32 rows want a relative precision that 16-bit ones would not show.
    IS_EXACT: tl.constexpr = rows.q.dtype == tl.float32
    s = softmax.logits(
        qk, row_scale, rows.softcap, rows.slopes, rows.pos, offs_n,
        SPEC.HAS_SOFTCAP, IS_EXACT, SPEC.HAS_ALIBI,
    )  # fmt: skip
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    IS_PRODUCT: tl.constexpr = IS_EXACT and not SPEC.HAS_SOFTCAP and not SPEC.HAS_ALIBI
    p, alpha, row_max, row_sum = softmax.step(
        row_max, row_sum, s, qk, row_scale, MASKED, IS_PRODUCT, IS_EXACT
    )

    p = round_to(p, v.dtype, SPEC.INTERPRETED)
    alpha = tl.broadcast_to(alpha[:, None], acc.shape)
    if IS_EXACT:  # a tile's sum by itself first: shorter chains of roundings
        acc = tl.fma(acc, alpha, dot(p, v, None, SPEC.INTERPRETED))
    else:
        acc = dot(p, v, acc * alpha, SPEC.INTERPRETED)
    return acc, row_max, row_sum


@triton.jit
def attend(
    acc,
    row_max,
    row_sum,
    row_scale,
    rows,
    source,
    low,
    high,
    full_low,
    full_high,
    FORMAT: tl.constexpr,
    SPEC,
):
    """All tiles of one source's keys low..high, of which full_low..full_high are seen by every
    row."""
    BLOCK_N: tl.constexpr = SPEC.BLOCK_N
    start = low
    if source.page_ids is not None:
        start = low // BLOCK_N * BLOCK_N  # whole pages a tile
    end = start + tl.cdiv(tl.maximum(high - start, 0), BLOCK_N) * BLOCK_N
    if SPEC.HAS_CACHE and SPEC.BLOCK_M <= 32 and not SPEC.HAS_TREE:
        # Few rows wait for memory: one loop is one pipeline to fill, not two, and reads without
        # masks, as the last tile reaches back over keys that have been visited.
        if high - low >= BLOCK_N:
            for begin in tl.range(low, high, BLOCK_N):
                acc, row_max, row_sum = visit(
                    acc, row_max, row_sum, row_scale, rows, source,
                    tl.minimum(begin, high - BLOCK_N), begin, high, FORMAT, True, True, SPEC,
                )  # fmt: skip
        elif low < high:
            acc, row_max, row_sum = visit(
                acc, row_max, row_sum, row_scale, rows, source,
                low, low, high, FORMAT, True, False, SPEC,
            )  # fmt: skip
    else:
        acc, row_max, row_sum = attend_by_kinds(
            acc, row_max, row_sum, row_scale, rows, source,
            low, high, full_low, full_high, start, end, FORMAT, SPEC,
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def attend_by_kinds(
    acc,
    row_max,
    row_sum,
    row_scale,
    rows,
    source,
    low,
    high,
    full_low,
    full_high,
    start,
    end,
    FORMAT: tl.constexpr,
    SPEC,
):
    """First the edges, masked, then the interior that every row sees."""
    BLOCK_N: tl.constexpr = SPEC.BLOCK_N
    full_low = tl.maximum(full_low, low)
    full_high = tl.minimum(full_high, high)
    full_start = start + tl.cdiv(full_low - start, BLOCK_N) * BLOCK_N
    full_start = tl.minimum(full_start, end)
    full_end = tl.maximum(start + tl.maximum(full_high - start, 0) // BLOCK_N * BLOCK_N, full_start)
    before = (full_start - start) // BLOCK_N
    edges = before + (end - full_end) // BLOCK_N
    for i in tl.range(0, edges):
        begin = tl.where(i < before, start + i * BLOCK_N, full_end + (i - before) * BLOCK_N)
        acc, row_max, row_sum = visit(
            acc, row_max, row_sum, row_scale, rows, source,
            begin, low, high, FORMAT, True, False, SPEC,
        )  # fmt: skip
    for begin in tl.range(full_start, full_end, BLOCK_N):
        acc, row_max, row_sum = visit(
            acc, row_max, row_sum, row_scale, rows, source,
            begin, low, high, FORMAT, False, True, SPEC,
        )  # fmt: skip
    return acc, row_max, row_sum
