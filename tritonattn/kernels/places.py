"""Which tile of queries a program works on, and which keys it sees."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import masks


class Inputs(NamedTuple):
    """What the kernel takes, but for its results and how the keys are cut."""

    q: object
    k: object
    v: object
    k_cache: object
    v_cache: object
    k_scale: object
    v_scale: object
    table: object
    batch: object
    scoring: object
    masking: object


class Place(NamedTuple):
    """Which tile, and which of the key tiles that it sees: ``count`` from number ``skip`` on."""

    sequence: object
    tile: object  # its number in the sequence
    head_block: object
    kv_head: object
    skip: object
    count: object


@triton.jit
def visible_keys(pos, num_keys, masking, SPEC):
    return masks.interval(
        pos, num_keys, masking.left, masking.right, masking.chunk,
        SPEC.HAS_LEFT, SPEC.HAS_RIGHT, SPEC.HAS_CHUNK,
    )  # fmt: skip


@triton.jit
def queries_of(sequence, batch):
    """(first token, tokens) of a sequence; sequence num_seqs are the rows past the last one."""
    if batch.cu_seqlens_q is not None:
        start = tl.load(batch.cu_seqlens_q + sequence)
        is_known = sequence < batch.num_seqs
        end = tl.load(batch.cu_seqlens_q + sequence + 1, mask=is_known, other=batch.total_q)
    else:
        start = sequence
        end = sequence + 1
    return start, end - start


@triton.jit
def is_elsewhere(len_q, batch):
    """Whether a sequence of so many queries is another launch's."""
    elsewhere = len_q < 0
    if batch.cu_seqlens_q is not None:
        elsewhere = (len_q < batch.least_q) | (len_q > batch.most_q)
    return elsewhere


@triton.jit
def keys_of(sequence, batch, q_start, len_q, SPEC):
    """(keys in the cache, first packed key, all keys) of a sequence; none past the last one."""
    is_known = sequence < batch.num_seqs
    context = 0
    k_start = q_start * 0
    if not SPEC.HAS_CACHE:
        k_start = tl.load(batch.lens + sequence)
        len_k = tl.load(batch.lens + sequence + 1, mask=is_known, other=k_start) - k_start
    else:
        context = tl.maximum(tl.load(batch.lens + sequence, mask=is_known, other=0), 0)
        len_k = context
        if SPEC.HAS_NEW:
            k_start = q_start
            len_k += tl.where(is_known, len_q, 0)
    return context, k_start, tl.maximum(len_k, 0)


@triton.jit
def tile_range(tile, shift, len_q, len_k, inputs, SPEC):
    """(low, high) of the keys that any row of a tile sees, (full_low, full_high) that all see."""
    BLOCK_Q: tl.constexpr = SPEC.BLOCK_M // SPEC.PACK
    first_pos = tile * BLOCK_Q + shift
    last_pos = tl.minimum(tile * BLOCK_Q + BLOCK_Q, len_q) - 1 + shift
    first_a, last_a = visible_keys(first_pos, len_k, inputs.masking, SPEC)
    first_b, last_b = visible_keys(last_pos, len_k, inputs.masking, SPEC)
    low, high, full_low, full_high = masks.tile_ranges(first_a, last_a, first_b, last_b)
    if SPEC.HAS_TREE:
        full_high = tl.minimum(full_high, tl.maximum(shift, 0))
    return low, high, full_low, full_high
