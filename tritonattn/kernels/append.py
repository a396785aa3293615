"""Where the new tokens of each sequence go in a paged cache, and how long it is with them.

Token t of those that sequence b gets stands at position ``p = cached[b] + t`` and goes to

    slot = table[b, p // page_size] * page_size + p % page_size
"""

import triton
import triton.language as tl

from .tiles import find_row


@triton.jit
def append_kernel(
    slots,  # [num_tokens] int64, written
    seq_lens,  # [num_seqs] int32, written
    cached,  # [num_seqs] int32
    cu_seqlens_new,  # None: ``length`` new tokens for each sequence
    table,  # Table
    num_columns,
    length,
    num_tokens,
    num_seqs,
    num_steps,  # of halving that find one among num_seqs + 1
    BLOCK: tl.constexpr,
):
    """One program a BLOCK of tokens and of sequences.

    A slot is -1 where the sequence has no page for the token or pads a graph, its length below 0.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = i < num_tokens
    if cu_seqlens_new is None:
        sequence = i // tl.maximum(length, 1)
        offset = i - sequence * length
    else:
        sequence = find_row(cu_seqlens_new, num_seqs, num_steps, i, BLOCK)
        is_token = is_token & (sequence < num_seqs)
        offset = i - tl.load(cu_seqlens_new + sequence)
    start = tl.load(cached + sequence, mask=is_token, other=-1)
    pos = start + offset
    column = pos // table.page_size
    ok = is_token & (start >= 0) & (offset >= 0) & (column < num_columns)
    row = table.ptr + sequence.to(tl.int64) * table.stride_seq
    page = tl.load(row + column, mask=ok, other=0).to(tl.int64)
    slot = tl.where(ok, page * table.page_size + pos % table.page_size, -1)
    tl.store(slots + i, slot, mask=i < num_tokens)

    is_sequence = i < num_seqs
    before = tl.load(cached + i, mask=is_sequence, other=0)
    added = length
    if cu_seqlens_new is not None:
        end = tl.load(cu_seqlens_new + i + 1, mask=is_sequence, other=0)
        added = tl.maximum(end - tl.load(cu_seqlens_new + i, mask=is_sequence, other=0), 0)
    after = tl.where(before < 0, before, before + added)
    tl.store(seq_lens + i, after, mask=is_sequence)
