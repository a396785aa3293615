"""Merging partial results of one softmax whose keys were split.

With (o_s, z_s) the output and natural-log lse of part s:

    m = max_s z_s    l = sum_s e^(z_s - m)    out = sum_s e^(z_s - m) o_s / l    lse = m + ln(l)

taken part by part in index order, so that the bits do not depend on how many empty parts lie
between the others.
"""

import triton
import triton.language as tl

from .casts import round_to, widen


@triton.jit
def merge_kernel(
    parts,  # Partials
    merged,  # Output; lse None: not wanted
    num_parts,
    num_rows,
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program a BLOCK_ROWS of (token, head) rows.

    A part whose lse is -inf is empty: its output is never used.  A row of which ``counts`` has one
    part is left as it is.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = (row // num_heads).to(tl.int64)
    head = (row % num_heads).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = (offs_d < HEAD_DIM)[None, :]
    out_ptrs = (parts.ptr + token * parts.stride_token + head * parts.stride_head)[:, None]
    out_ptrs += offs_d[None, :]  # [BLOCK_ROWS, BLOCK_D]
    lse_ptrs = parts.lse + head * parts.stride_lse_head + token  # [BLOCK_ROWS]

    mask_row = row < num_rows
    count = tl.zeros([BLOCK_ROWS], tl.int32) + num_parts
    last = num_parts
    if parts.counts is not None:
        counts = parts.counts + head * parts.stride_lse_head + token
        count = tl.load(counts, mask=mask_row, other=1)
        mask_row = mask_row & (count > 1)
        count = tl.where(mask_row, count, 0)
        last = tl.max(count, 0)

    row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    # Starts from -0.0, as -0.0 + x is x also where x is -0.0.
    acc = tl.full([BLOCK_ROWS, BLOCK_D], -(2**31), tl.int32).to(tl.float32, bitcast=True)
    s = 0
    while s < last:
        # Four parts' loads are on their way before the first is waited for.
        lse_0, out_0 = _load(parts, lse_ptrs, out_ptrs, mask_row, mask_d, s, count)
        lse_1, out_1 = _load(parts, lse_ptrs, out_ptrs, mask_row, mask_d, s + 1, count)
        lse_2, out_2 = _load(parts, lse_ptrs, out_ptrs, mask_row, mask_d, s + 2, count)
        lse_3, out_3 = _load(parts, lse_ptrs, out_ptrs, mask_row, mask_d, s + 3, count)
        row_max, row_sum, acc = _add(row_max, row_sum, acc, lse_0, widen(out_0, INTERPRETED))
        row_max, row_sum, acc = _add(row_max, row_sum, acc, lse_1, widen(out_1, INTERPRETED))
        row_max, row_sum, acc = _add(row_max, row_sum, acc, lse_2, widen(out_2, INTERPRETED))
        row_max, row_sum, acc = _add(row_max, row_sum, acc, lse_3, widen(out_3, INTERPRETED))
        s += 4

    # A lone part has a sum of exactly 1 and passes through unchanged.
    is_empty = row_sum == 0.0
    divisor = tl.where(is_empty, 1.0, row_sum)
    result = tl.math.div_rn(acc, tl.broadcast_to(divisor[:, None], (BLOCK_ROWS, BLOCK_D)))
    result = tl.where(is_empty[:, None], 0.0, result)
    out_ptrs = (merged.ptr + token * merged.stride_token + head * merged.stride_head)[:, None]
    out_ptrs += offs_d[None, :]
    result = round_to(result, merged.ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptrs, result, mask=mask_row[:, None] & mask_d)
    if merged.lse is not None:
        lse = tl.where(row_sum == 1.0, row_max, row_max + tl.log(divisor))
        tl.store(merged.lse + head * merged.stride_lse_head + token, lse, mask=mask_row)


@triton.jit
def _load(parts, lse_ptrs, out_ptrs, mask_row, mask_d, s, count):
    """(lse [BLOCK_ROWS], out [BLOCK_ROWS, BLOCK_D]) of part s; past the last part an empty one.

    ``out`` is read whether or not the part is empty: asking lse first would be a second trip to
    memory.
    """
    mask_row = mask_row & (s < count)  # [BLOCK_ROWS]
    part = tl.cast(s, tl.int64)
    lse = tl.load(lse_ptrs + part * parts.stride_lse_part, mask=mask_row, other=float("-inf"))
    out = tl.load(out_ptrs + part * parts.stride_part, mask=mask_row[:, None] & mask_d, other=0.0)
    return lse, out


@triton.jit
def _add(row_max, row_sum, acc, lse, out):
    is_empty = lse == float("-inf")
    m_new = tl.maximum(row_max, lse)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp(row_max - shift)
    weight = tl.exp(lse - shift)
    acc = tl.where(is_empty[:, None], acc, acc * alpha[:, None] + out * weight[:, None])
    row_sum = tl.where(is_empty, row_sum, row_sum * alpha + weight)
    return m_new, row_sum, acc
