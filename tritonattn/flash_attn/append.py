"""Where new tokens go in a cache, and a cache as pages of single tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import Text, bad_value


class Tokens(NamedTuple):
    """Packed tokens ``[n]``: the ``offset``-th of those that sequence ``sequence`` gets."""

    sequence: Tensor
    offset: Tensor
    inside: Tensor | None  # False for rows that no sequence owns; None: there are none


def dense_tokens(batch: int, length: int, device: torch.device) -> Tokens:
    """``length`` tokens for each of ``batch`` sequences."""
    token = torch.arange(batch * length, device=device)
    return Tokens(token // max(length, 1), token % max(length, 1), None)


def packed_tokens(starts: Tensor, count: int) -> Tokens:
    """``count`` rows, of which ``starts[b]:starts[b + 1]`` are those of sequence b."""
    token = torch.arange(count, dtype=starts.dtype, device=starts.device)
    found = torch.searchsorted(starts, token, right=True) - 1
    last = starts.shape[0] - 2
    sequence = found.clamp(0, last)
    return Tokens(sequence, token - starts[sequence], found == sequence)


def slots(tokens: Tokens, cached: Tensor, table: Tensor, page_size: int) -> Tensor:
    """The slot of each token, int64; -1 if its sequence is padding or has no page for it."""
    if table.shape[1] == 0:
        return torch.full_like(tokens.sequence, -1, dtype=torch.int64)
    start = cached[tokens.sequence]
    pos = start + tokens.offset
    column = pos // page_size
    known = column.clamp(0, table.shape[1] - 1)
    slot = table[tokens.sequence, known].long() * page_size + pos % page_size
    ok = (start >= 0) & (column == known)
    return torch.where(ok if tokens.inside is None else ok & tokens.inside, slot, -1)


def as_token_pages(
    f: str, k_cache: Tensor, v_cache: Tensor, table: Tensor, skipped: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The caches as views whose pages are single tokens, and the table of these pages.

    A row of the table starts behind the first ``skipped`` tokens of its sequence, which need not be
    whole pages.
    """
    steps = _tokens_a_page(k_cache), _tokens_a_page(v_cache)
    if steps[0] is None or steps[0] != steps[1]:
        rule = "asks for caches whose pages lie a whole number of tokens apart, the same for both"
        strides = f"k_cache with strides {list(k_cache.stride())}"
        got = Text(f"{strides}, v_cache with strides {list(v_cache.stride())}")
        raise bad_value(f, "cache_leftpad", rule, got, "Pass two caches of the same layout.")
    size, capacity = k_cache.shape[1], table.shape[1] * k_cache.shape[1]
    token = torch.arange(capacity, device=table.device) + skipped[:, None]
    token = token.clamp(0, max(capacity - 1, 0))  # past the end nothing is followed
    ids = table.long().gather(1, token // size) * steps[0] + token % size
    return _token_pages(k_cache, steps[0]), _token_pages(v_cache, steps[0]), ids


def _tokens_a_page(cache: Tensor) -> int | None:
    """Tokens from one page's start to the next one's, None if that is no whole number."""
    pages, size = cache.shape[:2]
    page, token = cache.stride()[:2]
    if pages <= 1 or size == 1:
        return size
    return page // token if token and page % token == 0 else None


def _token_pages(cache: Tensor, step: int) -> Tensor:
    pages, size, heads, dim = cache.shape
    stride = cache.stride(0) if size == 1 else cache.stride(1)
    count = (pages - 1) * step + size if pages else 0
    strides = (stride, stride, cache.stride(2), cache.stride(3))
    return cache.as_strided((count, 1, heads, dim), strides)
