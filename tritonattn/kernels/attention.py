"""Attention of packed queries over cached keys, packed keys, or the first followed by the second.

    out_i = sum_j softmax_j(s_ij) v_j,   s_ij = scale q_i . k_j  (capped, biased and masked)

A tile is (token, head) rows of one sequence and one KV head.  A program takes one tile, or one part
of the keys that one sees, or an equal share of all tiles' keys (``splits``).  The three public
functions are this kernel with other sources of keys.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import softmax
from .casts import split_power
from .keys import Source, pages_of
from .places import Inputs, Place, is_elsewhere, keys_of, queries_of, tile_range, visible_keys
from .results import rows_to_store, store_rows, store_share, store_whole
from .splits import find_piece, tiles_per_part
from .tiles import find_sequence, load_scale, load_tile, look_up, tile_rows
from .walk import Queries, all_values, attend, no_values


@triton.jit
def load_blocks(row_ptrs, row_ok, SPEC):
    """A tile's queries, block by block of their dims."""
    q_blocks = ()
    for i in tl.static_range(len(SPEC.BLOCKS)):
        block = load_tile(
            row_ptrs, row_ok, i * SPEC.BLOCKS[0], SPEC.BLOCKS[i], SPEC.HEAD_DIM, True, SPEC.ALIGNED
        )
        if SPEC.PAIRS:  # even and odd ones, as keys come
            q_blocks += tl.split(tl.reshape(block, (SPEC.BLOCK_M, SPEC.BLOCKS[i] // 2, 2)))
        else:
            q_blocks += (block,)
    return q_blocks


@triton.jit
def attend_tile(inputs, place, q_start, len_q, SPEC):
    """(out [BLOCK_M, BLOCK_DV], natural-log lse [BLOCK_M]) over the place's keys."""
    batch = inputs.batch
    scoring = inputs.scoring
    sequence = place.sequence
    kv_head = place.kv_head
    is_known = sequence < batch.num_seqs  # rows past the last sequence see no keys
    offs_m = tl.arange(0, SPEC.BLOCK_M)
    offs_q, head, row_ok = tile_rows(offs_m, place.tile, len_q, place.head_block, kv_head, SPEC)
    token = q_start + offs_q

    context, k_start, len_k = keys_of(sequence, batch, q_start, len_q, SPEC)
    shift = len_k - len_q
    pos = offs_q + shift  # [BLOCK_M]
    first = None
    last = None
    if batch.cu_seqlens_q is not None:  # else all rows of a tile are one query's
        first, last = visible_keys(pos, len_k, inputs.masking, SPEC)  # [BLOCK_M]
    low, high, full_low, full_high = tile_range(place.tile, shift, len_q, len_k, inputs, SPEC)
    if SPEC.SPLIT != "":
        first_tile = low // SPEC.BLOCK_N + place.skip
        low = tl.maximum(low, first_tile * SPEC.BLOCK_N)
        high = tl.minimum(high, (first_tile + place.count) * SPEC.BLOCK_N)

    page_ids = None
    pages = None
    if SPEC.HAS_CACHE:
        page_ids = pages_of(sequence, inputs.table)
    if SPEC.FEW_ROWS:  # on their way before the queries
        offs_n = low + tl.arange(0, SPEC.BLOCK_N)
        is_cached = offs_n < tl.minimum(high, context)
        pages = look_up(page_ids, inputs.table, offs_n, is_cached, SPEC.PAGE_SIZE, True)
    q = inputs.q
    q_rows = q.ptr + token.to(tl.int64) * q.stride_token + head * q.stride_head
    q_blocks = load_blocks(q_rows, row_ok, SPEC)
    IS_EXACT: tl.constexpr = q_blocks[0].dtype == tl.float32
    row_scale = tl.full([SPEC.BLOCK_M], 1.0, tl.float32) * scoring.softmax_scale
    if SPEC.HAS_QUERY_SCALE:
        row_scale *= tl.load(scoring.query_scale + token, mask=row_ok, other=0.0)
    # -inf, from what the compiler cannot see through: triton 3.9 copies nothing ahead in a loop
    # that starts from a constant maximum and whose number of tiles a program finds out.
    nothing = tl.where(offs_q < -(1 << 30), 0.0, float("-inf"))  # [BLOCK_M]
    slopes = nothing
    if SPEC.HAS_ALIBI:
        slope_ptrs = scoring.alibi_slopes + tl.cast(sequence, tl.int64) * scoring.stride_alibi_seq
        slope_ptrs += head * scoring.stride_alibi_head
        # Not is_known, which the interpreter would widen to a mask of integers.
        has_slope = row_ok & (sequence + tl.zeros_like(offs_q) < batch.num_seqs)
        slopes = tl.load(slope_ptrs, mask=has_slope, other=0.0).to(tl.float32)
    sink = nothing
    if SPEC.HAS_SINK:
        sink = tl.load(scoring.sinks + head * scoring.stride_sinks, mask=row_ok, other=0.0)
        counts = is_known
        if SPEC.SPLIT != "":
            counts = counts & (place.skip == 0)  # once, however the keys are cut
        sink = tl.where(counts, sink.to(tl.float32), float("-inf"))
    row_max, row_sum = softmax.start(sink, SPEC.HAS_SINK, IS_EXACT)
    tree_rows = token.to(tl.int64)
    if SPEC.HAS_TREE:
        tree_rows = inputs.masking.tree + tree_rows * inputs.masking.stride_tree_row
    rows = Queries(
        q_blocks, pos, first, last, slopes, scoring.softcap, row_ok, tree_rows, inputs.masking,
        shift,
    )  # fmt: skip
    cached_rows = rows
    cached_row_scale = row_scale
    if SPEC.HALF_FP8:
        # float8 becomes float16 by one instruction, and bfloat16 by several.
        halves, power = split_power(q_blocks, len(q_blocks), SPEC.INTERPRETED)
        cached_row_scale = row_scale * power
        cached_rows = Queries(
            halves, pos, first, last, slopes, scoring.softcap, row_ok, tree_rows, inputs.masking,
            shift,
        )  # fmt: skip

    acc = no_values(SPEC)
    k_scale = load_scale(inputs.k_scale, sequence, kv_head, is_known)
    v_scale = load_scale(inputs.v_scale, sequence, kv_head, is_known)
    if SPEC.HAS_CACHE:
        k_cache = inputs.k_cache
        v_cache = inputs.v_cache
        head_stride = v_cache.stride_head
        if head_stride is None:
            head_stride = k_cache.stride_head
        cached = Source(
            k_cache.ptr + kv_head.to(tl.int64) * k_cache.stride_head,
            v_cache.ptr + kv_head.to(tl.int64) * head_stride,
            k_cache.stride_token, v_cache.stride_token,
            k_cache.stride_page, v_cache.stride_page, page_ids, pages, inputs.table, 0, 0, 0,
        )  # fmt: skip
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, cached_row_scale * k_scale, cached_rows, cached,
            low, tl.minimum(high, context), full_low, full_high, SPEC.CACHE_FORMAT, SPEC,
        )  # fmt: skip
        acc = (all_values(acc) * v_scale,)
    if SPEC.HAS_NEW:
        k = inputs.k
        v = inputs.v
        if SPEC.BOXES:
            packed = Source(k, v, 0, 0, 0, 0, None, None, None, context, k_start, kv_head)
        else:
            first_row = k_start.to(tl.int64)
            packed = Source(
                k.ptr + kv_head.to(tl.int64) * k.stride_head + first_row * k.stride_token,
                v.ptr + kv_head.to(tl.int64) * v.stride_head + first_row * v.stride_token,
                k.stride_token, v.stride_token, 0, 0, None, None, None, context, 0, 0,
            )  # fmt: skip
        if not SPEC.HAS_CACHE:
            row_scale *= k_scale
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, row_scale, rows, packed,
            tl.maximum(low, context), high, full_low, full_high, "", SPEC,
        )  # fmt: skip
        if not SPEC.HAS_CACHE:
            acc = (acc[0] * v_scale,)
    return softmax.finish(acc[0], row_max, row_sum, IS_EXACT)


@triton.jit
def attention_kernel(
    q,  # Rows
    k,  # packed keys: Rows, a descriptor if SPEC.BOXES, or None
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
    partials,  # Partials, if SPEC.SPLIT is "parts"
    splits,  # Splits then, Shares if SPEC.SPLIT is "shares"
    num_kv_heads,
    SPEC: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = SPEC.BLOCK_M // SPEC.PACK
    HEAD_BLOCKS: tl.constexpr = (SPEC.GROUP + SPEC.PACK - 1) // SPEC.PACK
    inputs = Inputs(
        q, k, v, k_cache, v_cache, k_scale, v_scale, table, batch, scoring, masking
    )  # fmt: skip
    walks = num_kv_heads * HEAD_BLOCKS
    if SPEC.EARLY:
        gdc_wait()  # nothing is read before
        gdc_launch_dependents()

    # Programs that share keys and values stand next to each other; late query tiles, which see most
    # keys, come first.
    if SPEC.SPLIT == "shares":
        piece = find_piece(tl.program_id(0), batch, splits, walks, BLOCK_Q, SPEC)
        if piece.keys == 0:
            return
        q_start, len_q = queries_of(piece.sequence, batch)
        tile = tl.cdiv(len_q, BLOCK_Q) - 1 - piece.tile // walks
        walk = piece.tile % walks
        place = Place(
            piece.sequence, tile, walk % HEAD_BLOCKS, walk // HEAD_BLOCKS,
            piece.part * piece.keys, piece.keys,
        )  # fmt: skip
        out, lse = attend_tile(inputs, place, q_start, len_q, SPEC)
        store_share(splits, output, out, lse, place, piece, q_start, len_q, num_kv_heads, SPEC)
    else:
        # First parts come before all others, of which many may find nothing to do.
        pid = tl.program_id(0)
        head_block = pid % HEAD_BLOCKS
        pid = pid // HEAD_BLOCKS
        kv_head = pid % num_kv_heads
        pid = pid // num_kv_heads
        tiles = tl.num_programs(0) // walks
        part = pid * 0
        if SPEC.SPLIT == "parts":
            tiles = tiles // splits.most
            part = pid // tiles
            pid = pid % tiles
        sequence = tiles - 1 - pid
        tile = sequence * 0
        if batch.cu_seqlens_q is not None:
            sequence, tile = find_sequence(batch.cu_seqlens_q, batch.num_seqs, sequence, BLOCK_Q)
        q_start, len_q = queries_of(sequence, batch)
        if (tile * BLOCK_Q >= len_q) | is_elsewhere(len_q, batch):
            return
        parts = 1
        share = 0
        if SPEC.SPLIT == "parts":
            _, _, len_k = keys_of(sequence, batch, q_start, len_q, SPEC)
            low, high, _, _ = tile_range(tile, len_k - len_q, len_q, len_k, inputs, SPEC)
            low = low // SPEC.BLOCK_N
            num_tiles = tl.cdiv(tl.maximum(high, low * SPEC.BLOCK_N), SPEC.BLOCK_N) - low
            share = tiles_per_part(num_tiles, splits)
            parts = tl.maximum(tl.cdiv(num_tiles, share), 1)
            if part >= parts:
                return
        place = Place(sequence, tile, head_block, kv_head, part * share, share)
        out, lse = attend_tile(inputs, place, q_start, len_q, SPEC)
        token, head, row_ok = rows_to_store(place, q_start, len_q, num_kv_heads, SPEC.BLOCK_M, SPEC)
        if SPEC.SPLIT == "parts":
            store_rows(output, partials, out, lse, part, parts, token, head, row_ok, SPEC)
        else:
            store_whole(output, out, lse, token, head, row_ok, SPEC)
