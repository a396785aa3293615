"""Attention of packed queries over cached keys, packed keys, or the first followed by the second.

    out_i = sum_j softmax_j(s_ij) v_j,   s_ij = scale q_i . k_j  (capped, biased and masked)

A program takes one tile of (token, head) rows of one sequence and one KV head, and one part of the
keys that they see.  The three public functions are this kernel with other sources of keys.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import masks, softmax
from .casts import split_power
from .splits import tiles_per_part
from .tiles import find_sequence, load_scale, load_tile, store_tile
from .walk import Queries, Source, attend


class Scoring(NamedTuple):
    softmax_scale: object
    softcap: object
    query_scale: object  # [total_q] or None
    alibi_slopes: object  # [Hq] or [B, Hq] or None
    stride_alibi_seq: object
    stride_alibi_head: object
    sinks: object  # [Hq] or None
    stride_sinks: object


class Masking(NamedTuple):
    left: object
    right: object
    chunk: object
    tree: object  # [total_q, width] bytes or None
    stride_tree_row: object
    stride_tree_col: object
    tree_width: object


@triton.jit
def tile_rows(offs_m, tile, len_q, head_block, kv_head, SPEC):
    """(token in the sequence, query head, whether there is such a row) of a tile's rows."""
    BLOCK_Q: tl.constexpr = SPEC.BLOCK_M // SPEC.PACK
    offs_q = tile * BLOCK_Q + offs_m // SPEC.PACK
    head_in_group = head_block * SPEC.PACK + offs_m % SPEC.PACK
    row_ok = (offs_q < len_q) & (offs_m < BLOCK_Q * SPEC.PACK) & (head_in_group < SPEC.GROUP)
    return offs_q, (kv_head * SPEC.GROUP + head_in_group).to(tl.int64), row_ok


@triton.jit
def visible_keys(pos, num_keys, masking, SPEC):
    return masks.interval(
        pos, num_keys, masking.left, masking.right, masking.chunk,
        SPEC.HAS_LEFT, SPEC.HAS_RIGHT, SPEC.HAS_CHUNK,
    )  # fmt: skip


@triton.jit
def load_blocks(row_ptrs, row_ok, SPEC):
    """A tile's queries, block by block of their dims."""
    q_blocks = ()
    for i in tl.static_range(len(SPEC.BLOCKS)):
        block = load_tile(
            row_ptrs, row_ok, i * SPEC.BLOCKS[0], SPEC.BLOCKS[i], SPEC.HEAD_DIM, True, SPEC.ALIGNED
        )
        q_blocks += (block,)
    return q_blocks


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
    if SPEC.SPLIT:
        if part == 0:
            counts = partials.counts + head * partials.stride_lse_head + token
            tl.store(counts, tl.zeros_like(token) + parts, mask=row_ok)
        if parts > 1:
            store_part(partials, acc, lse, part, token, head, row_ok, SPEC)
        else:
            store_whole(output, acc, lse, token, head, row_ok, SPEC)
    else:
        store_whole(output, acc, lse, token, head, row_ok, SPEC)


@triton.jit
def attention_kernel(
    q,  # Rows
    k,  # Rows or None: packed keys
    v,
    k_cache,  # Pages or None
    v_cache,
    k_scale,  # Dequantise, of the cache; of the packed keys where there is no cache
    v_scale,
    table,  # Table or None
    batch,  # Batch
    scoring,  # Scoring
    masking,  # Masking
    output,  # Output
    partials,  # Partials, if SPEC.SPLIT
    splits,  # Splits, if SPEC.SPLIT
    num_kv_heads,
    SPEC: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = SPEC.BLOCK_M // SPEC.PACK
    HEAD_BLOCKS: tl.constexpr = (SPEC.GROUP + SPEC.PACK - 1) // SPEC.PACK

    # Programs that share keys and values stand next to each other; late query tiles, which see most
    # keys, come first.  First parts come before all others, of which many may find nothing to do.
    pid = tl.program_id(0)
    head_block = pid % HEAD_BLOCKS
    pid = pid // HEAD_BLOCKS
    kv_head = pid % num_kv_heads
    pid = pid // num_kv_heads
    tiles = tl.num_programs(0) // (HEAD_BLOCKS * num_kv_heads)
    part = pid * 0
    if SPEC.SPLIT:
        tiles = tiles // splits.most
        part = pid // tiles
        pid = pid % tiles
    tile = tiles - 1 - pid

    # The sequence, its queries and its keys.
    if batch.cu_seqlens_q is not None:
        sequence, tile = find_sequence(batch.cu_seqlens_q, batch.num_seqs, tile, BLOCK_Q)
        q_start = tl.load(batch.cu_seqlens_q + sequence)
        has_end = sequence < batch.num_seqs
        q_end = tl.load(batch.cu_seqlens_q + sequence + 1, mask=has_end, other=batch.total_q)
    else:
        sequence = tile
        tile = tile * 0
        q_start = sequence
        q_end = sequence + 1
    len_q = q_end - q_start
    if tile * BLOCK_Q >= len_q:
        return

    offs_m = tl.arange(0, SPEC.BLOCK_M)
    offs_q, head, row_ok = tile_rows(offs_m, tile, len_q, head_block, kv_head, SPEC)
    token = q_start + offs_q

    acc = tl.zeros([SPEC.BLOCK_M, SPEC.BLOCK_DV], tl.float32)
    nothing = tl.full([SPEC.BLOCK_M], float("-inf"), tl.float32)
    if sequence >= batch.num_seqs:  # rows past the last sequence
        if part == 0:
            store_rows(output, partials, acc, nothing, part, 1, token, head, row_ok, SPEC)
        return

    context = 0  # keys in the cache
    k_start = 0  # the sequence's first packed key
    if not SPEC.HAS_CACHE:
        k_start = tl.load(batch.lens + sequence)
        len_k = tl.load(batch.lens + sequence + 1) - k_start
    else:
        context = tl.maximum(tl.load(batch.lens + sequence), 0)
        len_k = context
        if SPEC.HAS_NEW:
            k_start = q_start
            len_k += len_q
    len_k = tl.maximum(len_k, 0)

    # What the tile's rows see, and this program's share of it.
    shift = len_k - len_q
    pos = offs_q + shift  # [BLOCK_M]
    first_pos = tile * BLOCK_Q + shift
    last_pos = tl.minimum(tile * BLOCK_Q + BLOCK_Q, len_q) - 1 + shift
    first, last = visible_keys(pos, len_k, masking, SPEC)  # [BLOCK_M]
    first_a, last_a = visible_keys(first_pos, len_k, masking, SPEC)
    first_b, last_b = visible_keys(last_pos, len_k, masking, SPEC)
    low, high, full_low, full_high = masks.tile_ranges(first_a, last_a, first_b, last_b)
    if SPEC.HAS_TREE:
        full_high = tl.minimum(full_high, tl.maximum(shift, 0))
    first_tile = low // SPEC.BLOCK_N
    num_tiles = tl.cdiv(tl.maximum(high, low), SPEC.BLOCK_N) - first_tile
    parts = 1
    if SPEC.SPLIT:
        walks = num_kv_heads * HEAD_BLOCKS
        share = tiles_per_part(num_tiles, splits, batch, walks, BLOCK_Q, SPEC)
        parts = tl.maximum(tl.cdiv(num_tiles, share), 1)
        if part >= parts:
            return
        low = tl.maximum(low, (first_tile + part * share) * SPEC.BLOCK_N)
        high = tl.minimum(high, (first_tile + (part + 1) * share) * SPEC.BLOCK_N)

    q_rows = q.ptr + token.to(tl.int64) * q.stride_token + head * q.stride_head
    q_blocks = load_blocks(q_rows, row_ok, SPEC)
    IS_EXACT: tl.constexpr = q_blocks[0].dtype == tl.float32
    row_scale = tl.full([SPEC.BLOCK_M], 1.0, tl.float32) * scoring.softmax_scale
    if SPEC.HAS_QUERY_SCALE:
        row_scale *= tl.load(scoring.query_scale + token, mask=row_ok, other=0.0)
    slopes = nothing
    if SPEC.HAS_ALIBI:
        slope_ptrs = scoring.alibi_slopes + tl.cast(sequence, tl.int64) * scoring.stride_alibi_seq
        slope_ptrs += head * scoring.stride_alibi_head
        slopes = tl.load(slope_ptrs, mask=row_ok, other=0.0).to(tl.float32)
    sink = nothing
    if SPEC.HAS_SINK:
        sink = tl.load(scoring.sinks + head * scoring.stride_sinks, mask=row_ok, other=0.0)
        sink = tl.where(part == 0, sink.to(tl.float32), float("-inf"))
    row_max, row_sum = softmax.start(sink, SPEC.HAS_SINK, IS_EXACT)
    tree_rows = token.to(tl.int64)
    if SPEC.HAS_TREE:
        tree_rows = masking.tree + tree_rows * masking.stride_tree_row
    rows = Queries(
        q_blocks, pos, first, last, slopes, scoring.softcap, row_ok, tree_rows, masking, shift
    )
    cached_rows = rows
    cached_row_scale = row_scale
    if SPEC.HALF_FP8:
        # float8 becomes float16 by one instruction, and bfloat16 by several.
        halves, power = split_power(q_blocks, len(SPEC.BLOCKS), SPEC.INTERPRETED)
        cached_row_scale = row_scale * power
        cached_rows = Queries(
            halves, pos, first, last, slopes, scoring.softcap, row_ok, tree_rows, masking, shift
        )

    cached_scale = load_scale(k_scale, sequence, kv_head)
    cached_v_scale = load_scale(v_scale, sequence, kv_head)
    if SPEC.HAS_CACHE:
        if table.indptr is not None:
            page_ids = table.ptr + tl.load(table.indptr + sequence)
        else:
            page_ids = table.ptr + tl.cast(sequence, tl.int64) * table.stride_seq
        cached = Source(
            k_cache.ptr + kv_head.to(tl.int64) * k_cache.stride_head,
            v_cache.ptr + kv_head.to(tl.int64) * v_cache.stride_head,
            k_cache.stride_token, v_cache.stride_token,
            k_cache.stride_page, v_cache.stride_page, page_ids, table, 0,
        )  # fmt: skip
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, cached_row_scale * cached_scale, cached_rows, cached,
            low, tl.minimum(high, context), full_low, full_high, SPEC.CACHE_FORMAT, SPEC,
        )  # fmt: skip
        acc *= cached_v_scale
    if SPEC.HAS_NEW:
        first_row = k_start.to(tl.int64)
        packed = Source(
            k.ptr + kv_head.to(tl.int64) * k.stride_head + first_row * k.stride_token,
            v.ptr + kv_head.to(tl.int64) * v.stride_head + first_row * v.stride_token,
            k.stride_token, v.stride_token, 0, 0, None, None, context,
        )  # fmt: skip
        if not SPEC.HAS_CACHE:
            row_scale *= cached_scale
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, row_scale, rows, packed,
            tl.maximum(low, context), high, full_low, full_high, "", SPEC,
        )  # fmt: skip
        if not SPEC.HAS_CACHE:
            acc *= cached_v_scale

    # The rows anew, from a zero that the compiler cannot see through: what only the end needs would
    # otherwise hold a dozen registers all through the loops.
    offs_m += num_kv_heads >> 30
    offs_q, head, row_ok = tile_rows(offs_m, tile, len_q, head_block, kv_head, SPEC)
    token = q_start + offs_q
    out, lse = softmax.finish(acc, row_max, row_sum, IS_EXACT)
    store_rows(output, partials, out, lse, part, parts, token, head, row_ok, SPEC)
