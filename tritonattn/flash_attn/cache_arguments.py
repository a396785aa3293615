"""The arguments of ``flash_attn_with_kvcache``, checked, as what its computation takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import rules
from ..errors import bad_value
from .common import heads_last
from .rotary import Rotary


class New(NamedTuple):
    """Packed new tokens: ``length`` for each sequence, or those that ``starts`` says."""

    k: Tensor
    v: Tensor
    starts: Tensor | None
    length: int


def new_tokens(
    f: str,
    k: object,
    v: object,
    starts: Any,
    batch: int,
    k_cache: Tensor,
    v_cache: Tensor,
) -> New | None:
    if k is None and v is None and starts is None:
        return None
    for name, x in (("k", k), ("v", v)):
        if x is None:
            fix = "Pass k and v, or neither of the two and no cu_seqlens_k_new."
            raise bad_value(f, name, "must be given with the other new tensors", None, fix)
    heads, dim, dim_v = *k_cache.shape[2:], v_cache.shape[3]
    packed = starts is not None
    axes = "[total_new, Hkv" if packed else "[batch, seqlen_new, Hkv"
    last = 2 if packed else 3
    sizes = {last - 1: (heads, "Hkv of k_cache"), last: (dim, "D of k_cache")}
    if not packed:
        sizes[0] = (batch, "batch of q")
    k = heads_last(f, "k", k, f"{axes}, D]", sizes)
    rules.same_device(f, "k", k, k_cache.device, "k_cache")
    sizes |= {i: (n, f"axis {i} of k") for i, n in enumerate(k.shape[:-1])}
    v = heads_last(f, "v", v, f"{axes}, Dv]", sizes | {last: (dim_v, "Dv of v_cache")})
    if packed:
        starts_of(f, "cu_seqlens_k_new", starts, batch, k_cache.device)
        return New(k, v, starts, 0)
    return New(k.flatten(0, 1), v.flatten(0, 1), None, k.shape[1])


def starts_of(f: str, name: str, value: object, batch: int | None, device: torch.device) -> int:
    """The number of sequences."""
    starts = rules.int32_vector(f, name, value, "[batch + 1]", device)
    fix = "Pass the prefix sums of the lengths: 0 first, the total last."
    if batch is not None:
        rules.length(f, name, starts, batch + 1, f"batch + 1, batch {batch} of q", fix)
    elif starts.shape[0] < 1:
        raise bad_value(f, name, "must have batch + 1 entries", starts, fix)
    return starts.shape[0] - 1


def vector(
    f: str, name: str, value: object, batch: int, device: torch.device, index: bool = False
) -> Tensor:
    if index and isinstance(value, Tensor) and value.dtype == torch.int64:
        rules.rank(f, name, value, 1, "[batch]")
        rules.same_device(f, name, value, device, "q")
        vector = value
    else:
        vector = rules.int32_vector(f, name, value, "[batch]", device)
    rules.length(f, name, vector, batch, "batch of q", "Pass one entry for each sequence.")
    return vector


def page_ids(f: str, table: Any, index: Any, batch: int, k_cache: Tensor) -> Tensor:
    """Page ids of each sequence, whose only page is a whole row where there is no table."""
    device = k_cache.device
    if index is not None:
        index = vector(f, "cache_batch_idx", index, batch, device, index=True)
    if table is None:
        if index is None:
            if k_cache.shape[0] < batch:
                rule = f"must have a row on axis 0 for each of {batch} sequences"
                fix = "Pass a block_table for a paged cache, or cache_batch_idx to share rows."
                raise bad_value(f, "k_cache", rule, k_cache, fix)
            index = torch.arange(batch, dtype=torch.int32, device=device)
        return index[:, None]
    if index is None:
        rules.block_table(f, table, None, batch, device)
        return table
    rows = table.shape[0] if isinstance(table, Tensor) and table.dim() else batch
    rules.block_table(f, table, None, rows, device)
    return table.index_select(0, index)


def cached_lengths(
    f: str, value: Any, batch: int, capacity: int, new: New | None, device: torch.device
) -> Tensor:
    """Tokens in the cache before the new ones."""
    if isinstance(value, Tensor):
        return vector(f, "cache_seqlens", value, batch, device)
    if value is None:
        if new is not None:
            fix = "Pass how many tokens the cache holds without the new ones."
            raise bad_value(f, "cache_seqlens", "must be given with k and v", None, fix)
    else:
        fix = "Pass the tokens in the cache, new ones not counted, or a cache with more room."
        room = capacity - (0 if new is None else new.length)
        rules.integer(f, "cache_seqlens", value, 0, room, fix=fix)
    length = capacity if value is None else value
    return torch.full((batch,), length, dtype=torch.int32, device=device)


def rotary(
    f: str,
    cos: Any,
    sin: Any,
    interleaved: bool,
    start: Any,
    new: New | None,
    cached: Tensor,
    capacity: int,
    q: Tensor,
) -> Rotary | None:
    rules.flag(f, "rotary_interleaved", interleaved)
    if cos is None and sin is None:
        if start is not None:
            fix = "Pass rotary_cos and rotary_sin as well, or no rotary_seqlens."
            raise bad_value(f, "rotary_seqlens", "needs rotary_cos and rotary_sin", start, fix)
        return None
    rows = max(capacity if start is None else 0, 1)
    for name, x, other in (("rotary_cos", cos, "rotary_sin"), ("rotary_sin", sin, "rotary_cos")):
        if x is None:
            fix = "Pass rotary_cos and rotary_sin, or neither."
            raise bad_value(f, name, f"must be given together with {other}", None, fix)
        rules.tensor(f, name, x, "[rows, R]")
        rules.dtype(f, name, x, rules.FLOAT_DTYPES, f"Pass {name}.float().")
        rules.rank(f, name, x, 2, "[rows, R]")
        rules.same_device(f, name, x, q.device, "q")
        rules.no_grad(f, name, x)
        if 2 * x.shape[1] > q.shape[-1]:
            rule = f"must have at most D / 2 = {q.shape[-1] // 2} entries on axis 1"
            raise bad_value(f, name, rule, x, "A column rotates two dims of a head.")
        if x.shape[0] < rows:
            rule = f"must have a row for each of the {rows} tokens that the cache can hold"
            raise bad_value(f, name, rule, x, f"Pass {name} for more positions.")
    if sin.shape != cos.shape:
        fix = "Pass rotary_cos and rotary_sin of one shape."
        raise bad_value(f, "rotary_sin", "must have the shape of rotary_cos", sin, fix)
    if new is None:
        rule = "must come with k and v, as flash-attn rotates what it appends"
        fix = "Pass the new k and v, or rotate q before the call."
        raise bad_value(f, "rotary_cos", rule, cos, fix)
    if start is not None:
        cached = vector(f, "rotary_seqlens", start, cached.shape[0], q.device)
    return Rotary(cos, sin, interleaved, cached)
