"""Where the keys and values of one sequence and one KV head lie, and how a tile of them is read."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import masks
from .casts import as_loaded, decode, decode_pairs
from .tiles import load_box, load_tile, look_up, slots


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
    pages: object  # of the first tile's keys, if few rows walk over them
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


@triton.jit
def pages_of(sequence, table):
    """Where a sequence's page ids start."""
    if table.indptr is not None:
        page_ids = table.ptr + tl.load(table.indptr + sequence)
    else:
        page_ids = table.ptr + tl.cast(sequence, tl.int64) * table.stride_seq
    return page_ids


@triton.jit
def pages_at(source, begin, SPEC):
    """The pages of a whole tile of keys from ``begin`` on, all of which are there."""
    offs_n = begin + tl.arange(0, SPEC.BLOCK_N)
    return look_up(source.page_ids, source.table, offs_n, None, SPEC.PAGE_SIZE, False)


@triton.jit
def locate(
    source, begin, low, high, rows, pages, MASKED: tl.constexpr, GUARDED: tl.constexpr, SPEC
):
    """The tile of keys from ``begin`` on, of which low..high count.

    Nothing else is read if GUARDED; else the whole tile is there to be read, and ends before
    ``high``.  ``pages`` None: they are not known yet.
    """
    offs_n = begin + tl.arange(0, SPEC.BLOCK_N)
    ok = offs_n >= low
    if GUARDED:
        ok = ok & (offs_n < high)
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
        if pages is None:
            pages = look_up(source.page_ids, source.table, offs_n, ok, SPEC.PAGE_SIZE, GUARDED)
        page = pages.to(tl.int64)
        slot = slots(source.table, offs_n, SPEC.PAGE_SIZE)
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
    """Columns FIRST.. of rows, as a tuple: all in one [BLOCK_N, BLOCK], or the even and the odd
    ones of pairs of float8 numbers."""
    if FORMAT != "" and SPEC.PAIRS:
        row_ptrs = row_ptrs.to(tl.pointer_type(tl.uint16), bitcast=True)
        pairs = load_tile(row_ptrs, ok, FIRST // 2, BLOCK // 2, DIM // 2, MASKED, SPEC.ALIGNED)
        blocks = decode_pairs(pairs, FORMAT, DTYPE)
    else:
        tile = load_tile(row_ptrs, ok, FIRST, BLOCK, DIM, MASKED, SPEC.ALIGNED)
        if FORMAT != "":
            tile = decode(tile, FORMAT, DTYPE, SPEC.NATIVE_FP8)
        blocks = (tile,)
    return blocks


@triton.jit
def load_k(source, tile, INDEX: tl.constexpr, FORMAT: tl.constexpr, DTYPE, GUARDED, SPEC):
    """Keys' dims that one of BLOCKS covers."""
    if SPEC.BOXES and source.page_ids is None:
        blocks = (load_box(source.k, source.head, tile.k_rows, SPEC.BLOCK_N, SPEC.BLOCKS[INDEX]),)
    else:
        blocks = load_keys(
            tile.k_rows, tile.ok, INDEX * SPEC.BLOCKS[0], SPEC.BLOCKS[INDEX], SPEC.HEAD_DIM, FORMAT,
            DTYPE, GUARDED, SPEC,
        )  # fmt: skip
    return blocks


@triton.jit
def load_v(source, tile, FORMAT: tl.constexpr, DTYPE, GUARDED, SPEC):
    if SPEC.BOXES and source.page_ids is None:
        v = load_box(source.v, source.head, tile.v_rows, SPEC.BLOCK_N, SPEC.BLOCK_DV)
        if GUARDED:  # boxes reach into the neighbours' rows
            v = tl.where(tile.ok[:, None], v, 0.0)
        blocks = (v,)
    else:
        blocks = load_keys(
            tile.v_rows, tile.ok, 0, SPEC.BLOCK_DV, SPEC.HEAD_DIM_V, FORMAT, DTYPE, GUARDED, SPEC
        )
        if FORMAT != "" and SPEC.NATIVE_FP8 and not SPEC.PAIRS and tl.float32 != DTYPE:
            blocks = (as_loaded(blocks[0], tile.offs_n),)
    return blocks
