"""Where rows lie: sequences, pages, tiles, and how a tile is read and written."""

from typing import NamedTuple

import triton
import triton.language as tl

from .casts import round_to, widen


class Rows(NamedTuple):
    """Packed rows ``[tokens, heads, dim]``."""

    ptr: object
    stride_token: object
    stride_head: object


class Pages(NamedTuple):
    """A paged cache ``[pages, page_size, heads, dim]``.

    Values that lie as the keys do, or in them, have no strides of their own: a fifth of a decode's
    instructions are spent on addresses.
    """

    ptr: object
    stride_page: object
    stride_token: object
    stride_head: object


class Dequantise(NamedTuple):
    """True value = stored value x scale; ``ptr`` None: the same scale everywhere."""

    value: object
    ptr: object
    stride_seq: object
    stride_head: object


class Table(NamedTuple):
    """Page ids: one row a sequence, or flat with ``indptr``."""

    ptr: object
    indptr: object
    stride_seq: object
    page_size: object


class Batch(NamedTuple):
    """``lens`` are cumulative for packed keys (varlen), else counts: of keys in the cache.

    A launch is for the sequences of ``least_q`` to ``most_q`` queries, the rows past the last
    sequence counting as one more; others are left to another launch.
    """

    cu_seqlens_q: object  # None: one query a sequence
    lens: object
    num_seqs: object
    total_q: object
    least_q: object  # None, as most_q, where each sequence has one query
    most_q: object


class Output(NamedTuple):
    """``[tokens, heads, dim]`` and, where lse is wanted, ``[heads, tokens]``."""

    ptr: object
    stride_token: object
    stride_head: object
    lse: object
    stride_lse_head: object


class Partials(NamedTuple):
    """Results over parts of the keys, ``[parts, tokens, heads, dim]`` and ``[parts, heads,
    tokens]`` float32.

    ``counts`` ``[heads, tokens]`` int32, laid out like an lse, says how many parts a row has; a
    single one needs no merging and is in the output already.  None: every row has them all.
    """

    ptr: object
    stride_part: object
    stride_token: object
    stride_head: object
    lse: object
    stride_lse_part: object
    stride_lse_head: object
    counts: object


@triton.jit
def find_sequence(cu_seqlens_q, num_seqs, tile, BLOCK_Q: tl.constexpr):
    """(sequence, the tile's number in it): sequence b owns tiles cu_seqlens_q[b] // BLOCK_Q + b on.

    That gives every sequence as many tiles as it needs without a sum over the others.  Rows past
    the last sequence belong to the sequence numbered ``num_seqs``.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_seqlens_q + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low, tile - (tl.load(cu_seqlens_q + low) // BLOCK_Q + low)


@triton.jit
def find_row(cu_seqlens, num_seqs, num_steps, rows, BLOCK: tl.constexpr):
    """For each of packed rows [BLOCK] the last sequence that starts at or before it.

    That is ``num_seqs`` for rows past the last sequence's end; ``num_steps`` of halving find one
    among num_seqs + 1.
    """
    sequence = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + num_seqs
    step = 0
    while step < num_steps:
        middle = (sequence + high + 1) // 2
        is_right = tl.load(cu_seqlens + middle) <= rows
        sequence = tl.where(is_right, middle, sequence)
        high = tl.where(is_right, high, middle - 1)
        step += 1
    return sequence


@triton.jit
def tile_rows(offs_m, tile, len_q, head_block, kv_head, SPEC):
    """(token in the sequence, query head, whether there is such a row) of a tile's rows."""
    BLOCK_Q: tl.constexpr = SPEC.BLOCK_M // SPEC.PACK
    offs_q = tile * BLOCK_Q + offs_m // SPEC.PACK
    head_in_group = head_block * SPEC.PACK + offs_m % SPEC.PACK
    row_ok = (offs_q < len_q) & (offs_m < BLOCK_Q * SPEC.PACK) & (head_in_group < SPEC.GROUP)
    return offs_q, (kv_head * SPEC.GROUP + head_in_group).to(tl.int64), row_ok


@triton.jit
def load_scale(scale, sequence, kv_head, is_known):
    value = scale.value
    if scale.ptr is not None:
        ptr = scale.ptr + sequence * scale.stride_seq + kv_head * scale.stride_head
        value = tl.load(ptr, mask=is_known, other=1.0)
    return value


@triton.jit
def page_size(table, PAGE_SIZE: tl.constexpr):
    """PAGE_SIZE 0: any, known at run time.  Unsigned, as are keys' numbers, which spares a division
    of them what negative ones would want."""
    size = table.page_size.to(tl.uint32)
    if PAGE_SIZE > 0:
        size = tl.full([], PAGE_SIZE, tl.uint32)
    return size


@triton.jit
def look_up(row, table, offs_n, ok, PAGE_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """The pages of keys ``offs_n`` of the sequence whose page ids start at ``row``."""
    ptrs = row + offs_n.to(tl.uint32) // page_size(table, PAGE_SIZE)
    page = tl.load(ptrs, mask=ok, other=0) if MASKED else tl.load(ptrs)
    if page.dtype == tl.int32:
        page = page.to(tl.uint32)
    return page


@triton.jit
def slots(table, offs_n, PAGE_SIZE: tl.constexpr):
    """Where in their pages keys ``offs_n`` lie."""
    return (offs_n.to(tl.uint32) % page_size(table, PAGE_SIZE)).to(tl.int64)


@triton.jit
def load_tile(
    row_ptrs,
    ok,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Columns FIRST.. of rows [N] as [N, BLOCK]; 0 past DIM and, if MASKED, in rows not ok.

    ALIGNED promises rows that start on 16 bytes, so that they are read 16 bytes at a time.
    """
    cols = FIRST + tl.arange(0, BLOCK)
    ptrs = row_ptrs[:, None] + cols[None, :]
    if ALIGNED:
        ptrs = tl.multiple_of(ptrs, (16, 16))
    if FIRST + BLOCK > DIM:
        inside = (cols < DIM)[None, :]
        if MASKED:
            inside = inside & ok[:, None]
        tile = tl.load(ptrs, mask=inside, other=0)
    elif MASKED:
        tile = tl.load(ptrs, mask=ok[:, None], other=0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def load_box(box, head, row, ROWS: tl.constexpr, COLS: tl.constexpr):
    """[ROWS, COLS] from a descriptor ``[heads, tokens, dim]``; 0 past its end."""
    return tl.reshape(box.load([head, row, 0]), [ROWS, COLS])


@triton.jit
def store_tile(
    row_ptrs,
    tile,
    ok,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    ALIGNED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """[N, BLOCK] into columns FIRST.. of the rows that are ok; nothing past DIM."""
    cols = FIRST + tl.arange(0, BLOCK)
    ptrs = row_ptrs[:, None] + cols[None, :]
    if ALIGNED:
        ptrs = tl.multiple_of(ptrs, (16, 16))
    inside = ok[:, None]
    if FIRST + BLOCK > DIM:
        inside = inside & (cols < DIM)[None, :]
    tl.store(ptrs, round_to(tile, row_ptrs.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit
def dot(a, b, acc, INTERPRETED: tl.constexpr):
    """a b + acc in float32; float32 operands are multiplied as such, not tf32.  ``acc`` None: zero.

    The interpreter multiplies a bfloat16's bits, so there the operands are widened first, and as
    far as to float64, as BLAS would sum float32 one product after the other: what that rounds
    depends on the machine, and to be shorter sums must be many.
    """
    if INTERPRETED:
        a = widen(a, INTERPRETED).to(tl.float64)
        b = widen(b, INTERPRETED).to(tl.float64)
        if acc is not None:
            acc = acc.to(tl.float64)
        product = tl.dot(a, b, acc, out_dtype=tl.float64).to(tl.float32)
    else:
        product = tl.dot(a, b, acc, input_precision="ieee")
    return product
