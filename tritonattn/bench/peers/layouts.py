"""A call's keys laid out otherwise, for peers that cannot read them where they are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...call import Call
from ...inputs import block_table, cumulative, generator
from ..cases import Case


class Packed(NamedTuple):
    k: Tensor  # [total_k, Hkv, D], sequence after sequence
    v: Tensor
    cu_seqlens_k: Tensor  # [B + 1] int32


class Paged(NamedTuple):
    k_cache: Tensor  # [pages, page_size, Hkv, D]
    v_cache: Tensor
    block_table: Tensor  # [B, max_pages] int32
    seq_lens: Tensor  # [B] int32


def packed(case: Case, call: Call) -> Packed:
    """All keys of each sequence, cached and new ones, contiguous."""
    device = call.q.device
    if call.k is not None and call.v is not None and call.k_cache is None:
        assert call.cu_seqlens_k is not None
        return Packed(call.k, call.v, call.cu_seqlens_k)
    assert call.k_cache is not None
    assert call.v_cache is not None
    assert call.block_table is not None
    parts: list[list[Tensor]] = [[], []]
    first = 0
    for b, (cached, new) in enumerate(zip(case.k_lens, case.queries, strict=True)):
        j = torch.arange(cached, device=device)
        pages, offsets = call.block_table[b, j // case.page_size].long(), j % case.page_size
        sources = ((call.k_cache, call.k), (call.v_cache, call.v))
        for part, (cache, rows) in zip(parts, sources, strict=True):
            part.append(cache[pages, offsets])
            if rows is not None:
                part.append(rows[first : first + new])
        first += new
    k, v = (torch.cat(part) for part in parts)
    return Packed(k, v, cumulative(case.keys, device))


def paged(case: Case, call: Call) -> Paged:
    """All keys of each sequence in pages."""
    device = call.q.device
    if case.function == "paged_attention":
        assert call.k_cache is not None
        assert call.v_cache is not None
        assert call.block_table is not None
        assert call.seq_lens is not None
        return Paged(call.k_cache, call.v_cache, call.block_table, call.seq_lens)
    k, v, _ = packed(case, call)
    size = case.page_size
    table, pages = block_table(
        case.keys, size, generator=generator(0), spare_columns=0, device=device
    )
    j = [torch.arange(length, device=device) for length in case.keys]
    slots = torch.cat([table[b, i // size].long() * size + i % size for b, i in enumerate(j)])
    caches = []
    for rows in (k, v):
        cache = rows.new_zeros(pages, size, *rows.shape[1:])
        cache.flatten(0, 1)[slots] = rows
        caches.append(cache)
    seq_lens = torch.tensor(case.keys, dtype=torch.int32, device=device)
    return Paged(caches[0], caches[1], table, seq_lens)


def dense(case: Case, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """``[total, H, D]`` of equally long sequences as ``[B, length, H, D]``."""
    return x.view(case.batch, lengths[0], *x.shape[1:])
