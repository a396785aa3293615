"""What the tensors of an attention call must be, each by itself and one to another.

Sizes are compared with what they have to equal and with nothing else, so that they may be symbols.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import device as devices
from . import rules
from .call import Call
from .errors import Text, bad_value


class Sizes(NamedTuple):
    """What the rules learn from the tensors; 0 or None where a function has no such."""

    batch: int
    num_kv_heads: int
    head_dim_v: int
    total_k: int
    page_size: int
    pages: int
    cache_dtype: torch.dtype | None
    out_dtype: torch.dtype


def check(call: Call) -> Sizes:
    """Every rule about tensors, the cheap ones before the one that asks what the GPU can do."""
    f = call.function
    q = rules.tensor(f, "q", call.q, "[total_q, Hq, D]")
    fix = "Pass q in the model's dtype, such as q.half()."
    rules.dtype(f, "q", q, rules.COMPUTE_DTYPES, fix)
    rules.rank(f, "q", q, 3, "[total_q, Hq, D]", "Pack the tokens of all sequences on axis 0.")
    rules.unit_stride(f, "q", q)
    _, num_heads, _ = q.shape
    batch = _lengths(call, q)

    num_kv_heads = head_dim_v = total_k = page_size = pages = 0
    cache_dtype = None
    if f != "paged_attention":
        num_kv_heads, head_dim_v, total_k = _new_keys(call, q)
    if f != "varlen_attention":
        cache = _cache(call, q)
        num_kv_heads, head_dim_v, page_size, cache_dtype = cache
        pages = rules.block_table(f, call.block_table, call.block_indptr, batch, q.device)
    if num_heads < 1 or num_heads % num_kv_heads:
        got = Text(f"{num_heads} query heads and {num_kv_heads} KV heads")
        fix = "Pass q with a whole number of query heads for each KV head."
        raise bad_value(f, "q", "must have a multiple of the KV heads, Hq % Hkv == 0", got, fix)

    _options(call, q, batch, num_kv_heads)
    out_dtype = q.dtype if call.out is None else _out(call.out, f, q, head_dim_v)
    device = devices.describe(q.device)
    if not device.has_bf16:
        for name, dtype in (("q", q.dtype), ("out", out_dtype)):
            if dtype == torch.bfloat16:
                rules.bfloat16(f, name, device)
    return Sizes(batch, num_kv_heads, head_dim_v, total_k, page_size, pages, cache_dtype, out_dtype)


def _lengths(call: Call, q: torch.Tensor) -> int:
    """The number of sequences."""
    f, device = call.function, q.device
    starts = call.cu_seqlens_q
    batch = 0
    if f == "paged_attention":
        seq_lens = rules.int32_vector(f, "seq_lens", call.seq_lens, "[batch]", device)
        batch = seq_lens.shape[0]
        if starts is None:
            fix = "Pass one query a sequence, or cu_seqlens_q for several."
            rules.size(f, "q", q, 0, batch, "batch of seq_lens, as cu_seqlens_q is None", fix)
            return batch
    fix = "Pass the prefix sums of the lengths: 0 first, the total last."
    starts = rules.int32_vector(f, "cu_seqlens_q", starts, "[batch + 1]", device)
    if f == "paged_attention":
        what = f"batch + 1, batch {batch} of seq_lens"
        rules.length(f, "cu_seqlens_q", starts, batch + 1, what, fix)
        return batch
    if starts.shape[0] < 1:
        raise bad_value(f, "cu_seqlens_q", "must have batch + 1 entries", starts, fix)
    batch = starts.shape[0] - 1
    if f == "varlen_attention":
        ends = rules.int32_vector(f, "cu_seqlens_k", call.cu_seqlens_k, "[batch + 1]", device)
        what = f"batch + 1, batch {batch} of cu_seqlens_q"
        rules.length(f, "cu_seqlens_k", ends, batch + 1, what, fix)
    else:
        lens = rules.int32_vector(f, "context_lens", call.context_lens, "[batch]", device)
        fix = "Pass one cached length for each sequence, 0 where nothing is cached."
        rules.length(f, "context_lens", lens, batch, "batch of cu_seqlens_q", fix)
    return batch


def _new_keys(call: Call, q: torch.Tensor) -> tuple[int, int, int]:
    """(Hkv, Dv, total_k) of the packed keys and values."""
    f = call.function
    heads, head_dim_v = rules.kv_rows(f, call.k, call.v, q.device)
    k = rules.tensor(f, "k", call.k)
    rules.same_dtype(f, "k", k, q.dtype, "q")
    rules.same_dtype(f, "v", rules.tensor(f, "v", call.v), q.dtype, "q")
    rules.size(f, "k", k, 2, q.shape[2], "D of q", "Pass q and k with the same head size.")
    if f == "prefix_attention":
        fix = "Pass one new key for each query row; padding rows of q want padding rows of k."
        rules.size(f, "k", k, 0, q.shape[0], "total_q of q", fix)
    return heads, head_dim_v, k.shape[0]


def _cache(call: Call, q: torch.Tensor) -> tuple[int, int, int, torch.dtype]:
    """(Hkv, Dv, page_size, dtype) of the paged cache."""
    f = call.function
    heads, head_dim_v = rules.kv_pages(f, call.k_cache, call.v_cache, q.device)
    k_cache = rules.tensor(f, "k_cache", call.k_cache)
    fix = "Pass a cache of q's dtype or of float8; float8 values take k_scale and v_scale."
    rules.dtype(f, "k_cache", k_cache, (q.dtype, *rules.FP8_DTYPES), fix)
    fix = "Pass q and k_cache with the same head size."
    rules.size(f, "k_cache", k_cache, 3, q.shape[2], "D of q", fix)
    if call.k is not None and call.v is not None:
        fix = "Pass new keys and values with the heads and head sizes of the cache."
        rules.size(f, "k", call.k, 1, heads, "Hkv of k_cache", fix)
        rules.size(f, "v", call.v, 2, head_dim_v, "Dv of v_cache", fix)
    return heads, head_dim_v, k_cache.shape[1], k_cache.dtype


def _options(call: Call, q: torch.Tensor, batch: int, num_kv_heads: int) -> None:
    f, device = call.function, q.device
    total_q, num_heads, _ = q.shape
    if call.alibi_slopes is not None:
        what = f"[Hq = {num_heads}] or [batch = {batch}, Hq = {num_heads}]"
        _floats(f, "alibi_slopes", call.alibi_slopes, what, ((num_heads,), (batch, num_heads)), q)
    if call.sinks is not None:
        _floats(f, "sinks", call.sinks, f"[Hq = {num_heads}]", ((num_heads,),), q)
    if call.query_scale is not None:
        scale = rules.tensor(f, "query_scale", call.query_scale, "float32 [total_q]")
        rules.dtype(f, "query_scale", scale, (torch.float32,), "Pass query_scale.float().")
        _floats(f, "query_scale", scale, f"[total_q = {total_q}]", ((total_q,),), q)
    if call.tree_mask is not None:
        what = f"[total_q = {total_q}, max_seqlen_q]"
        mask = rules.tensor(f, "tree_mask", call.tree_mask, f"bool {what}")
        rules.dtype(f, "tree_mask", mask, (torch.bool,), "Pass tree_mask.bool().")
        rules.rank(f, "tree_mask", mask, 2, what)
        fix = "Pass one row for each query row, one column for each of its sequence's new keys."
        rules.size(f, "tree_mask", mask, 0, total_q, "total_q of q", fix)
        if mask.shape[1] < 1:
            raise bad_value(f, "tree_mask", "must have at least one column", mask, fix)
        rules.same_device(f, "tree_mask", mask, device, "q")
        if not call.causal:
            rule = "replaces the causal rule among the new keys, so causal must be True"
            got = Text("tree_mask with causal=False")
            raise bad_value(f, "tree_mask", rule, got, "Pass causal=True, or no tree_mask.")
    rules.scale(f, "k_scale", call.k_scale, num_kv_heads, device, batch)
    rules.scale(f, "v_scale", call.v_scale, num_kv_heads, device, batch)


def _floats(
    f: str,
    name: str,
    value: object,
    what: str,
    shapes: tuple[tuple[int, ...], ...],
    q: torch.Tensor,
) -> None:
    """A small float tensor of any float dtype and strides: launching converts it."""
    x = rules.tensor(f, name, value, what)
    rules.dtype(f, name, x, rules.FLOAT_DTYPES, f"Pass {name}.float().")
    if not rules.has_shape(x, *shapes):
        raise bad_value(f, name, f"must be {what}", x, f"Pass {name} in that shape.")
    rules.same_device(f, name, x, q.device, "q")


def _out(value: object, f: str, q: torch.Tensor, head_dim_v: int) -> torch.dtype:
    shape = (q.shape[0], q.shape[1], head_dim_v)
    what = f"[total_q, Hq, Dv] = {list(shape)}"
    out = rules.tensor(f, "out", value, what)
    fix = "Pass an out of a dtype that attention is computed in."
    rules.dtype(f, "out", out, rules.COMPUTE_DTYPES, fix)
    if not rules.has_shape(out, shape):
        fix = "Pass torch.empty of that shape; Dv is the last axis of the values."
        raise bad_value(f, "out", f"must be {what}", out, fix)
    rules.unit_stride(f, "out", out, "Pass an out whose last axis is contiguous.")
    rules.no_overlap(f, "out", out)
    rules.same_device(f, "out", out, q.device, "q")
    return out.dtype
