"""Packed sequences of different lengths: ``flash_attn_varlen_func`` and its packed forms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import api, rules
from ..call import Scale
from ..errors import bad_value
from .common import (
    Window,
    bound,
    either,
    heads_last,
    options,
    refuse,
    returned,
    run,
    scales,
    split_packed,
)

Result = Tensor | tuple[Tensor, Tensor, Tensor]

_NAMES = {"k_cache": "k", "v_cache": "v", "seq_lens": "seqused_k"}


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    attention_chunk: int = 0,
    q_descale: Scale = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    num_splits: int = 0,
    qv: None = None,
    pack_gqa: None = None,
    sm_margin: int = 0,
) -> Result:
    """Attention of packed sequences of different lengths, over packed or over paged keys.

    Masks are aligned to each sequence's last key.

    Args:
        q: ``[total_q, Hq, D]``, float16, bfloat16 or float32.
        k: ``[total_k, Hkv, D]``, q's dtype or float8; with ``block_table`` ``[num_pages, page_size,
            Hkv, D]``, any page_size and strides.
        v: the same with Dv.
        cu_seqlens_q: ``[B + 1]`` int32, prefix sums of the numbers of queries.
        cu_seqlens_k: ``[B + 1]`` int32, prefix sums of the numbers of keys: where they lie, or with
            ``block_table`` how many there are; may then be None where ``seqused_k`` says so.
        max_seqlen_q, max_seqlen_k: bounds on the lengths, which change no result.
        block_table, page_table: two names of ``[B, max_pages]`` int32 or int64, the ids of each
            sequence's pages in order.
        seqused_q: ``[B]`` int32: only so many of a sequence's first queries are used; the rows of
            the others are 0.
        seqused_k: ``[B]`` int32: only so many of its first keys are used.

    The other arguments, and what is raised: ``flash_attn_func``.

    Returns:
        ``out [total_q, Hq, Dv]``; with ``return_attn_probs`` a tuple ``(out, softmax_lse,
        S_dmask)``: ``softmax_lse [Hq, total_q]`` float32, ``S_dmask`` empty.

    Source: flash-attn's ``flash_attn_varlen_func``.

    >>> import torch
    >>> from tritonattn.flash_attn import flash_attn_varlen_func
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> q, k, v = torch.randn(3, 5, 4, 32, device=device)
    >>> starts = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)  # 2 and 3 tokens
    >>> out = flash_attn_varlen_func(q, k, v, starts, starts, 3, 3, causal=True)
    >>> torch.allclose(out[2], v[2])  # the first query of the second sequence sees one key
    True
    """
    f = "flash_attn_varlen_func"
    refuse(f, dropout_p=dropout_p, qv=qv, pack_gqa=pack_gqa, sm_margin=sm_margin)
    rules.flag(f, "deterministic", deterministic)
    how = options(
        f, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, num_splits=num_splits, sinks=sinks, s_aux=s_aux,
        attention_chunk=attention_chunk,
    )  # fmt: skip
    how |= {
        "max_seqlen_q": bound(max_seqlen_q),
        "max_seqlen_k": bound(max_seqlen_k),
        "return_lse": return_attn_probs,
    }
    table = either(f, "block_table", block_table, "page_table", page_table)
    q = heads_last(f, "q", q, "[total_q, Hq, D]", {})
    starts = rules.int32_vector(f, "cu_seqlens_q", cu_seqlens_q, "[batch + 1]", q.device)
    if starts.shape[0] < 1:
        fix = "Pass the prefix sums of the lengths: 0 first, the total last."
        raise bad_value(f, "cu_seqlens_q", "must have batch + 1 entries", starts, fix)
    batch = starts.shape[0] - 1
    used_q = _lengths(f, "seqused_q", seqused_q, batch, q)
    used_k = _lengths(f, "seqused_k", seqused_k, batch, q)
    ends = None
    if cu_seqlens_k is not None or table is None or used_k is None:
        ends = rules.int32_vector(f, "cu_seqlens_k", cu_seqlens_k, "[batch + 1]", q.device)
        fix = "Pass the prefix sums of the lengths: 0 first, the total last."
        what = f"batch + 1, batch {batch} of cu_seqlens_q"
        rules.length(f, "cu_seqlens_k", ends, batch + 1, what, fix)
    if table is not None:
        rules.block_table(f, table, None, batch, q.device)
        run(f, _NAMES, rules.kv_pages, f, k, v, q.device)
    else:
        k = heads_last(f, "k", k, "[total_k, Hkv, D]", {2: (q.shape[2], "D of q")})
        sizes = {0: (k.shape[0], "total_k of k"), 1: (k.shape[1], "Hkv of k")}
        v = heads_last(f, "v", v, "[total_k, Hkv, Dv]", sizes)
    how |= scales(f, q, batch, k.shape[-2], q_descale, k_descale, v_descale)
    lens = used_k
    is_paged = table is not None or used_k is not None or k.dtype in rules.FP8_DTYPES
    if ends is not None and is_paged:
        lens = ends.diff() if used_k is None else torch.minimum(used_k, ends.diff())

    if used_q is not None:
        starts = _split(starts, used_q, how)
        ends = None if ends is None else ends.repeat_interleave(2)[1:]
        lens = None if lens is None else torch.stack([lens, torch.zeros_like(lens)], 1).flatten()
        table = None if table is None else table.repeat_interleave(2, dim=0)
    if lens is None:
        return returned(q, run(f, {}, api.varlen_attention, q, k, v, starts, ends, **how))
    if table is None:  # pages of one token: a sequence's keys may end anywhere, and be float8
        k, v = k[:, None], v[:, None]
        table = torch.arange(k.shape[0], dtype=torch.int32, device=q.device)
        how["block_indptr"] = ends
    how["cu_seqlens_q"] = starts
    return returned(q, run(f, _NAMES, api.paged_attention, q, k, v, table, lens, **how))


def _lengths(f: str, name: str, value: object, batch: int, q: Tensor) -> Tensor | None:
    if value is None:
        return None
    lens = rules.int32_vector(f, name, value, "[batch]", q.device)
    fix = "Pass one length for each sequence."
    rules.length(f, name, lens, batch, "batch of cu_seqlens_q", fix)
    return lens


def _split(starts: Tensor, used: Tensor, how: dict[str, Any]) -> Tensor:
    """``cu_seqlens_q`` in which a sequence's unused queries are a sequence of their own.

    That one gets no keys; options that have a row for each sequence get two.
    """
    used = torch.minimum(used.clamp(min=0), starts.diff())
    ends = torch.stack([starts[:-1] + used, starts[1:]], 1).flatten()
    for name in ("alibi_slopes", "k_scale", "v_scale"):
        x = how[name]
        if isinstance(x, Tensor) and x.dim() == 2:
            how[name] = x.repeat_interleave(2, dim=0)
    return torch.cat([starts[:1], ends])


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 0,
) -> Result:
    """``flash_attn_varlen_func`` with keys and values in one ``kv``, ``[total_k, 2, Hkv, D]``.

    >>> import torch
    >>> from tritonattn.flash_attn import flash_attn_varlen_kvpacked_func
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> q, kv = torch.randn(5, 4, 32, device=device), torch.randn(5, 2, 2, 32, device=device)
    >>> starts = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)  # 2 and 3 tokens
    >>> flash_attn_varlen_kvpacked_func(q, kv, starts, starts, 3, 3).shape
    torch.Size([5, 4, 32])
    """
    f = "flash_attn_varlen_kvpacked_func"
    k, v = split_packed(f, "kv", kv, "[total_k, 2, Hkv, D]", 1)
    return run(
        f, {}, flash_attn_varlen_func, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, s_aux=s_aux, sinks=sinks,
        attention_chunk=attention_chunk, num_splits=num_splits,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 0,
) -> Result:
    """``flash_attn_varlen_func`` with all three in one ``qkv``, ``[total, 3, H, D]``.

    >>> import torch
    >>> from tritonattn.flash_attn import flash_attn_varlen_qkvpacked_func
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> qkv = torch.randn(5, 3, 4, 32, device=device)
    >>> starts = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)  # 2 and 3 tokens
    >>> flash_attn_varlen_qkvpacked_func(qkv, starts, 3).shape
    torch.Size([5, 4, 32])
    """
    f = "flash_attn_varlen_qkvpacked_func"
    q, k, v = split_packed(f, "qkv", qkv, "[total, 3, H, D]", 1)
    names = {"cu_seqlens_q": "cu_seqlens", "max_seqlen_q": "max_seqlen"}
    return run(
        f, names, flash_attn_varlen_func, q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, s_aux=s_aux, sinks=sinks, attention_chunk=attention_chunk,
        num_splits=num_splits,
    )  # fmt: skip
