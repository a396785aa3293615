"""The oracle: what every function of this package computes, in plain torch, sequence by sequence.

``s_ij = cap(q_i · k_j * softmax_scale * query_scale_i) - slope * |pos_i - j|``,
``out_i = Σ_j exp(s_ij) v_j / (Σ_j exp(s_ij) + exp(sink))`` over the keys j that row i sees,
``pos_i = i + lk - lq``.

The attention functions take what their namesakes in ``tritonattn`` take, options included, and
``compute_dtype``: float64 (the default) gives the truth about the same rounded inputs; the queries'
own dtype gives what attention written in PyTorch in that dtype would give, which is the measure of
how much error is fair.  ``out`` and ``lse`` come back in the dtype they were computed in (``lse``
at least float32), so that nothing is rounded before it is compared; ``out=`` is written, rounded to
its dtype, where it is given.  ``num_splits``, ``batch_invariant`` and ``max_seqlen_*`` have no
effect here.  Lengths are read on the host and no speed is sought.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .call import Call, Scale

Result = Tensor | tuple[Tensor, Tensor]
Fetch = Callable[[int, Tensor], tuple[Tensor, Tensor]]


def visible(
    lq: int,
    lk: int,
    causal: bool = True,
    window_size: tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    tree_mask: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which of ``lk`` keys each of a sequence's last ``lq`` positions sees: bool [lq, lk].

    ``tree_mask``, bool [lq, >= lq], takes the place of the causal rule among the last ``lq`` keys.
    """
    pos = torch.arange(lk - lq, lk, device=device)[:, None]
    j = torch.arange(lk, device=device)[None, :]
    seen = torch.ones(lq, lk, dtype=torch.bool, device=device)
    if tree_mask is not None:
        t = j - (lk - lq)  # a key's place among the last lq keys
        seen &= (t < 0) | tree_mask[:, t[0].clamp(min=0)]
    elif causal:
        seen &= j <= pos
    left, right = window_size if window_size is not None else (None, None)
    if left is not None and left >= 0:
        seen &= j >= pos - left
    if right is not None and right >= 0:
        seen &= j <= pos + right
    if chunk_size is not None:
        seen &= j // chunk_size == pos // chunk_size
    return seen


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    compute_dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Result:
    """Keys of sequence b are ``k[cu_seqlens_k[b]:cu_seqlens_k[b + 1]]``."""
    call = Call("varlen_attention", q, **options)
    starts, lengths = _spans(cu_seqlens_k)

    def fetch(b: int, j: Tensor) -> tuple[Tensor, Tensor]:
        rows = starts[b] + j
        return (
            _dequantise(k[rows], call.k_scale, b, compute_dtype),
            _dequantise(v[rows], call.v_scale, b, compute_dtype),
        )

    return _attend(call, _spans(cu_seqlens_q), lengths, fetch, v.shape[-1], compute_dtype)


def prefix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    *,
    block_indptr: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Result:
    """Keys are the first ``context_lens[b]`` cached tokens, then the sequence's own new rows."""
    call = Call("prefix_attention", q, **options)
    starts, new = _spans(cu_seqlens_q)
    contexts = [max(0, n) for n in context_lens.tolist()]

    def fetch(b: int, j: Tensor) -> tuple[Tensor, Tensor]:
        table, cached = _table(block_table, block_indptr, b), j[j < contexts[b]]
        rows = starts[b] + j[len(cached) :] - contexts[b]
        old_k = _cached(k_cache, table, cached, call.k_scale, b, compute_dtype)
        old_v = _cached(v_cache, table, cached, call.v_scale, b, compute_dtype)
        return (
            torch.cat([old_k, k[rows].to(compute_dtype)]),
            torch.cat([old_v, v[rows].to(compute_dtype)]),
        )

    lengths = [context + n for context, n in zip(contexts, new, strict=True)]
    return _attend(call, (starts, new), lengths, fetch, v.shape[-1], compute_dtype)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    block_indptr: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Result:
    """All ``seq_lens[b]`` keys are in the cache; without ``cu_seqlens_q``, one query a sequence."""
    call = Call("paged_attention", q, **options)
    lengths = [max(0, n) for n in seq_lens.tolist()]
    one_each = (list(range(len(lengths))), [1] * len(lengths))
    spans = one_each if cu_seqlens_q is None else _spans(cu_seqlens_q)

    def fetch(b: int, j: Tensor) -> tuple[Tensor, Tensor]:
        table = _table(block_table, block_indptr, b)
        return (
            _cached(k_cache, table, j, call.k_scale, b, compute_dtype),
            _cached(v_cache, table, j, call.v_scale, b, compute_dtype),
        )

    return _attend(call, spans, lengths, fetch, v_cache.shape[-1], compute_dtype)


def _attend(
    call: Call,
    queries: tuple[list[int], list[int]],
    key_lengths: list[int],
    fetch: Fetch,
    head_dim_v: int,
    dtype: torch.dtype,
) -> Result:
    """``fetch(b, j)``: keys [n, Hkv, D] and values [n, Hkv, Dv] of tokens j of sequence b."""
    q, device = call.q, call.q.device
    total_q, num_heads, head_dim = q.shape
    logit_dtype = torch.promote_types(dtype, torch.float32)
    scale = head_dim**-0.5 if call.softmax_scale is None else call.softmax_scale
    no_sinks = torch.full((num_heads,), -torch.inf, device=device)
    sinks = (no_sinks if call.sinks is None else call.sinks).to(logit_dtype)
    out = torch.zeros(total_q, num_heads, head_dim_v, dtype=dtype, device=device)
    lse = torch.full((num_heads, total_q), -torch.inf, dtype=logit_dtype, device=device)

    for b, (start, lq, lk) in enumerate(zip(*queries, key_lengths, strict=True)):
        rows = slice(start, start + lq)
        tree = None if call.tree_mask is None else call.tree_mask[rows]
        rule = (call.causal, call.window_size, call.chunk_size, tree)
        mask = visible(lq, lk, *rule, device=device)
        j = mask.any(0).nonzero()[:, 0]  # keys that no row sees are never fetched
        mask = mask[:, j]  # [lq, n]
        keys, values = fetch(b, j)
        group = num_heads // keys.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))

        s = torch.einsum("ihd,jhd->hij", q[rows].to(dtype), keys).to(logit_dtype) * scale
        if call.query_scale is not None:
            s = s * call.query_scale[rows].to(logit_dtype)[:, None]
        if call.softcap > 0:
            s = call.softcap * torch.tanh(s / call.softcap)
        if call.alibi_slopes is not None:
            slopes = call.alibi_slopes if call.alibi_slopes.dim() == 1 else call.alibi_slopes[b]
            distance = (torch.arange(lk - lq, lk, device=device)[:, None] - j).abs()
            s = s - slopes.float().to(logit_dtype)[:, None, None] * distance
        s = s.masked_fill(~mask, -torch.inf)
        s = torch.cat([s, sinks[:, None, None].expand(num_heads, lq, 1)], dim=-1)  # [Hq, lq, n + 1]
        lse[:, rows] = torch.logsumexp(s, dim=-1)
        # A row without a key or a sink is 0/0 here; filling its unseen keys makes it 0.
        p = torch.softmax(s, dim=-1)[..., :-1].masked_fill(~mask, 0.0)
        out[rows] = torch.einsum("hij,jhd->ihd", p.to(dtype), values)

    if call.out is not None:
        out = call.out.copy_(out)
    return (out, lse) if call.return_lse else out


def _spans(cu_seqlens: Tensor) -> tuple[list[int], list[int]]:
    """Starts and lengths; a length below 0 counts as 0."""
    edges = cu_seqlens.tolist()
    return edges[:-1], [max(0, end - start) for start, end in itertools.pairwise(edges)]


def _table(block_table: Tensor, block_indptr: Tensor | None, b: int) -> Tensor:
    return block_table[b] if block_indptr is None else block_table[int(block_indptr[b]) :]


def _cached(
    cache: Tensor, table: Tensor, j: Tensor, scale: Scale, b: int, dtype: torch.dtype
) -> Tensor:
    """Tokens ``j`` of sequence b, [n, Hkv, D] in ``dtype``; only their own pages are looked up."""
    page_size = cache.shape[1]
    rows = _raw(cache)[table[j // page_size].long(), j % page_size].view(cache.dtype)
    return _dequantise(rows, scale, b, dtype)


def _raw(x: Tensor) -> Tensor:
    """Float8 as bytes, since torch cannot index float8 everywhere."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _dequantise(x: Tensor, scale: Scale, b: int | None, dtype: torch.dtype) -> Tensor:
    """``x * scale`` for rows ``x`` [n, Hkv, D] of sequence b."""
    wide = torch.promote_types(dtype, torch.float32)
    return x.to(dtype) if scale is None else (x.to(wide) * _per_head(scale, b, x.device)).to(dtype)


def _per_head(scale: float | Tensor, b: int | None, device: torch.device) -> Tensor:
    """A scale of any accepted shape as float32 [Hkv or 1, 1]."""
    scale = torch.as_tensor(scale, dtype=torch.float32, device=device)
    return (scale[b] if scale.dim() == 2 else scale).reshape(-1, 1)


def merge_states(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, compute_dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` as if the keys of all states had been attended in one pass."""
    lse = torch.stack(list(lses)).to(compute_dtype)  # [states, H, T]
    empty = lse.isneginf()
    weights = torch.softmax(lse, dim=0).masked_fill(empty, 0.0).transpose(1, 2)[..., None]
    values = torch.stack(list(outs)).to(compute_dtype)
    values = values.masked_fill(empty.transpose(1, 2)[..., None], 0.0)
    return (weights * values).sum(0), torch.logsumexp(lse, dim=0)


def write_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> None:
    """Row i of ``k`` and ``v`` goes to slot ``slot_mapping[i]``, if the cache has such a slot."""
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    wanted = ((slot_mapping >= 0) & (slot_mapping < num_slots)).nonzero()[:, 0]
    slots = slot_mapping[wanted].long()
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        stored = quantise(new[wanted], cache.dtype, scale)
        _raw(cache)[slots // cache.shape[1], slots % cache.shape[1]] = _raw(stored)


def quantise(x: Tensor, dtype: torch.dtype, scale: Scale = None) -> Tensor:
    """``x / scale`` [n, Hkv, D] in ``dtype``: nearest even, saturated to the finite range."""
    if scale is None and x.dtype == dtype:
        return x
    x = x.float() if scale is None else x.float() / _per_head(scale, None, x.device)
    limit = min(torch.finfo(dtype).max, torch.finfo(x.dtype).max)
    return x.clamp(-limit, limit).to(dtype)


def gather_kv_cache(
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_k: Tensor,
    total_k: int,
    k_scale: Scale = None,
    v_scale: Scale = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The cached tokens of all sequences, packed by ``cu_seqlens_k``; rows past them are 0."""
    k, v = (
        torch.zeros(total_k, *cache.shape[2:], dtype=out_dtype or cache.dtype, device=cache.device)
        for cache in (k_cache, v_cache)
    )
    for b, (start, length) in enumerate(zip(*_spans(cu_seqlens_k), strict=True)):
        j = torch.arange(min(length, max(0, int(seq_lens[b]))), device=k.device)
        for packed, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
            packed[start + j] = _cached(cache, block_table[b], j, scale, b, packed.dtype)
    return k, v


def copy_blocks(caches: Tensor | Sequence[Tensor], block_mapping: Tensor) -> None:
    """Within each cache, page ``block_mapping[i, 0]`` to page ``block_mapping[i, 1]``."""
    source, destination = block_mapping.long().unbind(1)
    for cache in [caches] if isinstance(caches, Tensor) else caches:
        _raw(cache)[destination] = _raw(cache)[source]
