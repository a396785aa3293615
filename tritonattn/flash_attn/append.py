"""Where new tokens go in a cache, and a cache as pages of single tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import device as devices
from ..errors import Text, bad_value
from ..tracing import is_traced

# Launches that were made, by all but the addresses of their tensors; cleared when full.
_repeats: dict[tuple[object, ...], Any] = {}
_REPEATS_LIMIT = 4096


def place(
    cached: Tensor,
    starts: Tensor | None,
    length: int,
    num_tokens: int,
    table: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """The slot of each of ``num_tokens`` new tokens, and each sequence's length with them.

    ``length`` tokens for each sequence, or those that ``starts`` says.  Slots are int64, -1 if a
    sequence is padding or has no page for a token; lengths below 0 stay as they are.
    """
    find = _place_traced if is_traced(cached) else _place
    return find(cached, starts, length, num_tokens, table, page_size)


def _place(
    cached: Tensor,
    starts: Tensor | None,
    length: int,
    num_tokens: int,
    table: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    slots, lens = _placed(cached, starts, length, num_tokens, table, page_size)
    given = (cached, table) if starts is None else (cached, starts, table)
    facts = (table.shape, table.stride(), table.dtype, length, num_tokens, page_size)
    key = (cached.device, len(given), *facts)
    repeat = _repeats.get(key)
    if repeat is not None:
        repeat(*[x.data_ptr() for x in (slots, lens, *given)])
        return slots, lens
    from .. import binaries
    from ..kernels.append import append_kernel
    from ..kernels.tiles import Table

    batch, columns = table.shape
    device = devices.describe(cached.device)
    block = 1024 if device.is_interpreter else 128
    args = (
        slots, lens, cached, starts, Table(table, None, table.stride(0), page_size), columns,
        length, num_tokens, batch, batch.bit_length(),
    )  # fmt: skip
    grid, how = -(-max(num_tokens, batch) // block), ({"BLOCK": block}, binaries.Options())
    launched = binaries.launch(append_kernel, grid, args, *how, device, cached.device)
    if launched is not None:
        if len(_repeats) >= _REPEATS_LIMIT:
            _repeats.clear()
        from ..repeat import Repeat

        _repeats[key] = Repeat(launched)
    return slots, lens


def _placed(
    cached: Tensor,
    starts: Tensor | None,
    length: int,
    num_tokens: int,
    table: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """What ``place`` returns, not filled in."""
    return cached.new_empty(num_tokens, dtype=torch.int64), cached.new_empty(cached.shape)


# What torch.compile sees in place of the launch.
_place_traced = torch.library.custom_op("tritonattn::place", _place, mutates_args=())
_place_traced.register_fake(_placed)


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
