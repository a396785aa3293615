"""Tensors for a case, drawn where they will be used, and this package's own call on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import api
from ..call import Call
from ..extras import alibi_slopes
from ..inputs import TENSORS, block_table, cumulative, generator
from .cases import Case

KV_SCALE = 0.5  # of keys and values in a float8 cache
MOST_COPIES = 64


def build(case: Case, device: torch.device, seed: int = 0) -> Call:
    """Standard normal values, pages shuffled; the same on every machine with the same device."""
    gen = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        drawable = case.dtype if dtype.itemsize == 1 else dtype
        return torch.randn(shape, generator=gen, device=device, dtype=drawable).to(dtype)

    (heads, kv_heads), (dim, dim_v) = case.heads, case.head_dims
    call = Call(case.function, q=normal(case.total_q, heads, dim), **_options(case, device))
    lens = torch.tensor(case.k_lens, dtype=torch.int32, device=device)
    if case.q_lens is not None:
        call.cu_seqlens_q = cumulative(case.q_lens, device)
    if case.function != "paged_attention":
        total_k = sum(case.k_lens) if case.function == "varlen_attention" else case.total_q
        call.k, call.v = normal(total_k, kv_heads, dim), normal(total_k, kv_heads, dim_v)
    if case.function == "varlen_attention":
        call.cu_seqlens_k = cumulative(case.k_lens, device)
        return call
    call.block_table, pages = block_table(
        case.k_lens, case.page_size, generator=generator(seed), spare_columns=0, device=device
    )
    pool, dtype = (pages, case.page_size, kv_heads), case.cache_dtype or case.dtype
    call.k_cache = normal(*pool, dim, dtype=dtype)
    call.v_cache = call.k_cache[..., :dim_v] if case.latent else normal(*pool, dim_v, dtype=dtype)
    if case.function == "prefix_attention":
        call.context_lens = lens
    else:
        call.seq_lens = lens
    return call


def _options(case: Case, device: torch.device) -> dict[str, Any]:
    gen, heads = generator(1), case.heads[0]
    options: dict[str, Any] = {
        "max_seqlen_q": max(case.queries),
        "max_seqlen_k": max(case.keys),
        "causal": case.causal,
        "softcap": case.softcap,
        "return_lse": case.lse,
        "batch_invariant": case.batch_invariant,
        "chunk_size": case.chunk,
    }
    if case.window is not None:
        options["window_size"] = (case.window - 1, 0)
    if case.alibi:
        options["alibi_slopes"] = alibi_slopes(heads, device=device)
    if case.sinks:
        options["sinks"] = torch.randn(heads, generator=gen).to(device)
    if case.query_scale:
        scale = torch.rand(case.total_q, generator=gen) + 0.5
        options["query_scale"] = scale.to(device)
    if case.cache_dtype is not None:
        options |= {"k_scale": KV_SCALE, "v_scale": KV_SCALE}
    return options


def copies(case: Case, call: Call, l2_bytes: int) -> list[Call]:
    """The call and copies of it on other memory: together three times the L2 cache or more.

    Called in turn, each finds its queries, keys and values evicted.  Tables and lengths are shared.
    """
    count = min(MOST_COPIES, max(1, -(-3 * l2_bytes // max(1, case.bytes))))
    return [call, *(_copy(case, call) for _ in range(count - 1))]


def _copy(case: Case, call: Call) -> Call:
    names = ("q", "k", "v", "k_cache", "v_cache")
    fresh = {name: x.clone() for name in names if (x := getattr(call, name)) is not None}
    if case.latent:
        fresh["v_cache"] = fresh["k_cache"][..., : case.head_dims[1]]
    return replace(call, **fresh)


def own(call: Call, out: Tensor | None = None) -> Callable[[], Any]:
    """This package's function on the call's arguments, ready to be called."""
    function = getattr(api, call.function)
    names = TENSORS[call.function]
    given = {n: getattr(call, n) for n in inspect.signature(function).parameters if n not in names}
    options = {name: x for name, x in given.items() if x is not None}
    if out is not None:
        options["out"] = out
    return partial(function, *(getattr(call, name) for name in names), **options)
