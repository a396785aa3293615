"""Moving keys and values into and out of a paged cache.

    stored = round(value / scale)        value = stored * scale

Token ``slot`` of a cache lies in page ``slot // page_size`` at offset ``slot % page_size``.
Without a scale and with one dtype on both sides nothing is computed, so values keep their bits.
"""

import triton
import triton.language as tl

from .casts import decode, encode, round_to, widen
from .tiles import find_row, load_scale, load_tile, store_tile


@triton.jit
def write_kernel(
    k,  # Rows
    v,
    k_cache,  # Pages
    v_cache,
    k_scale,  # Dequantise
    v_scale,
    slot_mapping,
    num_rows,
    num_heads,
    page_size,
    num_pages,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FORMAT: tl.constexpr,  # float8 format of the cache, "" for the values' own dtype
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    ALIGNED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program a BLOCK_ROWS of (new token, head) rows.

    Slots below 0 and past the cache's end are skipped.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = (row // num_heads).to(tl.int64)
    head = (row % num_heads).to(tl.int64)
    slot = tl.load(slot_mapping + token, mask=row < num_rows, other=-1).to(tl.int64)
    page = slot // page_size
    offset = slot - page * page_size
    ok = (slot >= 0) & (page < num_pages)

    k_rows = k.ptr + token * k.stride_token + head * k.stride_head
    v_rows = v.ptr + token * v.stride_token + head * v.stride_head
    k_tile = load_tile(k_rows, ok, 0, BLOCK_D, HEAD_DIM, True, ALIGNED)  # [BLOCK_ROWS, BLOCK_D]
    v_tile = load_tile(v_rows, ok, 0, BLOCK_DV, HEAD_DIM_V, True, ALIGNED)
    k_tile = _quantise(k_tile, k_scale, head, HAS_K_SCALE, FORMAT, INTERPRETED)
    v_tile = _quantise(v_tile, v_scale, head, HAS_V_SCALE, FORMAT, INTERPRETED)

    k_rows = k_cache.ptr + page * k_cache.stride_page + offset * k_cache.stride_token
    v_rows = v_cache.ptr + page * v_cache.stride_page + offset * v_cache.stride_token
    k_rows += head * k_cache.stride_head
    v_rows += head * v_cache.stride_head
    store_tile(k_rows, k_tile, ok, 0, BLOCK_D, HEAD_DIM, ALIGNED, INTERPRETED)
    store_tile(v_rows, v_tile, ok, 0, BLOCK_DV, HEAD_DIM_V, ALIGNED, INTERPRETED)


@triton.jit
def _quantise(
    tile, scale, head, HAS_SCALE: tl.constexpr, FORMAT: tl.constexpr, INTERPRETED: tl.constexpr
):
    """A tile [N, BLOCK] as the cache holds it; ``head`` [N]."""
    dtype: tl.constexpr = tile.dtype
    if HAS_SCALE or FORMAT != "":
        tile = widen(tile, INTERPRETED)
    if HAS_SCALE:
        divisor = tl.zeros(head.shape, tl.float32) + load_scale(scale, 0, head, True)
        tile = tl.math.div_rn(tile, tl.broadcast_to(divisor[:, None], tile.shape))
    if FORMAT != "":
        tile = encode(tile, FORMAT)
    elif HAS_SCALE:
        if dtype == tl.float16:
            greatest = 65504.0
        elif dtype == tl.bfloat16:
            greatest = 3.3895313892515355e38
        else:
            greatest = 3.4028234663852886e38
        tile = tl.where(tile > greatest, greatest, tl.where(tile < -greatest, -greatest, tile))
        tile = round_to(tile, dtype, INTERPRETED)
    return tile


@triton.jit
def gather_kernel(
    k,  # Rows, written
    v,
    k_cache,  # Pages
    v_cache,
    k_scale,  # Dequantise
    v_scale,
    table,  # Table
    cu_seqlens_k,
    seq_lens,
    num_rows,
    num_heads,
    num_seqs,
    num_steps,  # of halving that find one among num_seqs + 1
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    ALIGNED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program a BLOCK_ROWS of packed (token, head) rows; those without a cached token are 0."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask_row = row < num_rows
    token = row // num_heads
    head = (row % num_heads).to(tl.int64)

    sequence = find_row(cu_seqlens_k, num_seqs, num_steps, token, BLOCK_ROWS)
    inside = mask_row & (sequence < num_seqs)
    sequence = tl.minimum(sequence, num_seqs - 1)
    pos = token - tl.load(cu_seqlens_k + sequence)
    ok = inside & (pos >= 0) & (pos < tl.load(seq_lens + sequence))

    page_ptrs = table.ptr + sequence.to(tl.int64) * table.stride_seq + pos // table.page_size
    page = tl.load(page_ptrs, mask=ok, other=0).to(tl.int64)
    offset = (pos % table.page_size).to(tl.int64)
    k_rows = k_cache.ptr + page * k_cache.stride_page + offset * k_cache.stride_token
    v_rows = v_cache.ptr + page * v_cache.stride_page + offset * v_cache.stride_token
    k_rows += head * k_cache.stride_head
    v_rows += head * v_cache.stride_head
    k_tile = load_tile(k_rows, ok, 0, BLOCK_D, HEAD_DIM, True, ALIGNED)  # [BLOCK_ROWS, BLOCK_D]
    v_tile = load_tile(v_rows, ok, 0, BLOCK_DV, HEAD_DIM_V, True, ALIGNED)
    k_tile = _dequantise(
        k_tile, k_scale, sequence, head, ok, k.ptr.dtype.element_ty,
        HAS_K_SCALE, FORMAT, NATIVE_FP8, INTERPRETED,
    )  # fmt: skip
    v_tile = _dequantise(
        v_tile, v_scale, sequence, head, ok, v.ptr.dtype.element_ty,
        HAS_V_SCALE, FORMAT, NATIVE_FP8, INTERPRETED,
    )  # fmt: skip

    token = token.to(tl.int64)
    k_rows = k.ptr + token * k.stride_token + head * k.stride_head
    v_rows = v.ptr + token * v.stride_token + head * v.stride_head
    store_tile(k_rows, k_tile, mask_row, 0, BLOCK_D, HEAD_DIM, ALIGNED, INTERPRETED)
    store_tile(v_rows, v_tile, mask_row, 0, BLOCK_DV, HEAD_DIM_V, ALIGNED, INTERPRETED)


@triton.jit
def _dequantise(
    tile,
    scale,
    sequence,
    head,
    ok,
    DTYPE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A tile [N, BLOCK] of the cache as DTYPE; ``sequence``, ``head``, ``ok`` [N].

    Rows that are not ok hold 0 and stay so: the scale found for them is none of theirs.
    """
    if FORMAT != "":
        tile = decode(tile, FORMAT, tl.float32 if HAS_SCALE else DTYPE, NATIVE_FP8)
    if HAS_SCALE:
        factor = tl.zeros(head.shape, tl.float32) + load_scale(scale, sequence, head, True)
        factor = tl.where(ok, factor, 0.0)
        tile = widen(tile, INTERPRETED) * factor[:, None]
    if tile.dtype != DTYPE:
        tile = round_to(widen(tile, INTERPRETED), DTYPE, INTERPRETED)
    return tile
