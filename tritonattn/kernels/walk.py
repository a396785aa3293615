"""Walking over the keys that a tile of queries sees: where tiles lie, and what each one adds."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import masks, softmax
from .casts import as_loaded, decode, round_to
from .tiles import dot, load_box, load_tile, page_slots


class Source(NamedTuple):
    """Keys and values of one sequence and one KV head; key ``first`` is the source's first.

    ``k`` and ``v`` are pointers to the head's rows, or descriptors of packed rows of all heads.
    """

    k: object
    v: object
    k_stride_token: object
    v_stride_token: object
    k_stride_page: object
    v_stride_page: object  # None: as the keys' strides
    page_ids: object  # None: the rows are packed
    table: object
    first: object
    row: object  # of descriptors: the first key's row
    head: object


class Tile(NamedTuple):
    """Keys [BLOCK_N] and their values."""

    offs_n: object
    ok: object  # those that may be read
    visible: object  # [BLOCK_M, BLOCK_N]
    k_rows: object  # pointers, or the first row of a box
    v_rows: object


class Queries(NamedTuple):
    """A tile's rows: what they are multiplied with and what they see."""

    q: object  # a tuple: [BLOCK_M, width] for each of BLOCKS
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
    DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
    SPEC,
):
    tile = load_tile(row_ptrs, ok, FIRST, BLOCK, DIM, MASKED, SPEC.ALIGNED)
    if FORMAT != "":
        tile = decode(tile, FORMAT, DTYPE, SPEC.NATIVE_FP8)
    return tile


@triton.jit
def locate(source, begin, low, high, rows, MASKED: tl.constexpr, GUARDED: tl.constexpr, SPEC):
    """The tile of keys from ``begin`` on, of which low..high count.

    Nothing else is read if GUARDED; else the whole tile is there to be read.
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
        page, slot = page_slots(source.page_ids, source.table, offs_n, ok, SPEC.PAGE_SIZE, GUARDED)
        at = page * source.k_stride_page + slot * source.k_stride_token
        k_rows = source.k + at
        if source.v_stride_page is not None:
            at = page * source.v_stride_page + slot * source.v_stride_token
        v_rows = source.v + at
    elif SPEC.BOXES:
        k_rows = source.row + (begin - source.first)
        v_rows = k_rows
    else:
        token = (offs_n - source.first).to(tl.int64)
        k_rows = source.k + token * source.k_stride_token
        v_rows = source.v + token * source.v_stride_token
    return Tile(offs_n, ok, visible, k_rows, v_rows)


@triton.jit
def multiply_block(
    rows, source, tile, INDEX: tl.constexpr, qk, FORMAT: tl.constexpr, GUARDED: tl.constexpr, SPEC
):
    """q k^T [BLOCK_M, BLOCK_N] over the dims of one of BLOCKS, added to ``qk``; None: zero."""
    if SPEC.BOXES and source.page_ids is None:
        k = load_box(source.k, source.head, tile.k_rows, SPEC.BLOCK_N, SPEC.BLOCKS[INDEX])
    else:
        k = load_keys(
            tile.k_rows, tile.ok, INDEX * SPEC.BLOCKS[0], SPEC.BLOCKS[INDEX], SPEC.HEAD_DIM, FORMAT,
            rows.q[INDEX].dtype, GUARDED, SPEC,
        )  # fmt: skip
    return dot(rows.q[INDEX], tl.trans(k), qk, SPEC.INTERPRETED)


@triton.jit
def multiply_blocks(
    rows,
    source,
    tile,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    FORMAT: tl.constexpr,
    GUARDED: tl.constexpr,
    SPEC,
):
    """q k^T over COUNT blocks, each summed by itself and then in pairs: that rounds less than one
    long sum."""
    if COUNT == 1:
        qk = multiply_block(rows, source, tile, FIRST, None, FORMAT, GUARDED, SPEC)
    else:
        HALF: tl.constexpr = COUNT // 2
        qk = multiply_blocks(rows, source, tile, FIRST, HALF, FORMAT, GUARDED, SPEC)
        more = multiply_blocks(
            rows, source, tile, FIRST + HALF, COUNT - HALF, FORMAT, GUARDED, SPEC
        )
        # Not a plain sum: Triton makes dot(a, b, 0) + c the long sum dot(a, b, c).
        qk = tl.fma(qk, tl.full(qk.shape, 1.0, tl.float32), more)
    return qk


@triton.jit
def multiply_keys(rows, source, tile, FORMAT: tl.constexpr, GUARDED: tl.constexpr, SPEC):
    """q k^T [BLOCK_M, BLOCK_N]."""
    if rows.q[0].dtype == tl.float32:
        qk = multiply_blocks(rows, source, tile, 0, len(SPEC.BLOCKS), FORMAT, GUARDED, SPEC)
    else:
        qk = multiply_block(rows, source, tile, 0, None, FORMAT, GUARDED, SPEC)
        for i in tl.static_range(1, len(SPEC.BLOCKS)):
            qk = multiply_block(rows, source, tile, i, qk, FORMAT, GUARDED, SPEC)
    return qk


@triton.jit
def weigh(row_max, row_sum, row_scale, rows, tile, qk, MASKED: tl.constexpr, SPEC):
    """A tile's probabilities, the factor of what was summed before, and (row_max, row_sum)."""
    # float32 rows want a relative precision that 16-bit ones would not show.
    if rows.q[0].dtype == tl.float32:
        p, alpha, row_max, row_sum = softmax.exact_step(
            row_max, row_sum, qk, row_scale, rows.softcap, rows.slopes, rows.pos, tile.offs_n,
            tile.visible, SPEC.HAS_SOFTCAP, SPEC.HAS_ALIBI, MASKED,
        )  # fmt: skip
    else:
        s = softmax.logits(
            qk, row_scale, rows.softcap, rows.slopes, rows.pos, tile.offs_n,
            SPEC.HAS_SOFTCAP, SPEC.HAS_ALIBI,
        )  # fmt: skip
        if MASKED:
            s = tl.where(tile.visible, s, float("-inf"))
        IS_PRODUCT: tl.constexpr = not (MASKED or SPEC.HAS_SOFTCAP or SPEC.HAS_ALIBI)
        p, alpha, row_max, row_sum = softmax.step(
            row_max, row_sum, s, qk, row_scale * softmax.LOG2E, MASKED, IS_PRODUCT,
            not SPEC.HAS_SIGNED_SCALE,
        )  # fmt: skip
    return round_to(p, rows.q[0].dtype, SPEC.INTERPRETED), alpha, row_max, row_sum


@triton.jit
def add_values(
    acc, alpha, p, rows, source, tile, FORMAT: tl.constexpr, GUARDED: tl.constexpr, SPEC
):
    """alpha acc + p v."""
    if SPEC.BOXES and source.page_ids is None:
        v = load_box(source.v, source.head, tile.v_rows, SPEC.BLOCK_N, SPEC.BLOCK_DV)
        if GUARDED:  # boxes reach into the neighbours' rows
            v = tl.where(tile.ok[:, None], v, 0.0)
    else:
        v = load_keys(
            tile.v_rows, tile.ok, 0, SPEC.BLOCK_DV, SPEC.HEAD_DIM_V, FORMAT, rows.q[0].dtype,
            GUARDED, SPEC,
        )  # fmt: skip
        if FORMAT != "" and SPEC.NATIVE_FP8 and v.dtype != tl.float32:
            v = as_loaded(v, tile.offs_n)
    alpha = tl.broadcast_to(alpha[:, None], acc.shape)
    if rows.q[0].dtype == tl.float32:  # a tile's sum by itself first: shorter chains of roundings
        acc = tl.fma(acc, alpha, dot(p, v, None, SPEC.INTERPRETED))
    else:
        acc = dot(p, v, acc * alpha, SPEC.INTERPRETED)
    return acc


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
    GUARDED: tl.constexpr,
    SPEC,
):
    """One tile of keys, ``begin`` onward; MASKED where not every row sees all of it, GUARDED where
    not all of it may be read."""
    tile = locate(source, begin, low, high, rows, MASKED, GUARDED, SPEC)
    qk = multiply_keys(rows, source, tile, FORMAT, GUARDED, SPEC)
    p, alpha, row_max, row_sum = weigh(row_max, row_sum, row_scale, rows, tile, qk, MASKED, SPEC)
    acc = add_values(acc, alpha, p, rows, source, tile, FORMAT, GUARDED, SPEC)
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
                    tl.minimum(begin, high - BLOCK_N), begin, high, FORMAT, True, False, SPEC,
                )  # fmt: skip
        elif low < high:
            acc, row_max, row_sum = visit(
                acc, row_max, row_sum, row_scale, rows, source,
                low, low, high, FORMAT, True, True, SPEC,
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
            begin, low, high, FORMAT, True, True, SPEC,
        )  # fmt: skip
    for begin in tl.range(full_start, full_end, BLOCK_N):
        acc, row_max, row_sum = visit(
            acc, row_max, row_sum, row_scale, rows, source,
            begin, low, high, FORMAT, False, False, SPEC,
        )  # fmt: skip
    return acc, row_max, row_sum
