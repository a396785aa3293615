"""Batches of sequences of one length: ``flash_attn_func`` and its packed forms."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import api, rules
from ..call import Scale
from .common import (
    Window,
    by_batch,
    every,
    heads_last,
    options,
    refuse,
    returned,
    run,
    scales,
    split_packed,
)

Result = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    q_descale: Scale = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    num_splits: int = 0,
    qv: None = None,
    pack_gqa: None = None,
    sm_margin: int = 0,
) -> Result:
    """Attention of a batch whose sequences have one length of queries and one of keys.

    Masks are aligned to the last key: row i stands at ``i + seqlen_k - seqlen_q``.

    Args:
        q: ``[B, seqlen_q, Hq, D]``, float16, bfloat16 or float32, any strides.
        k: ``[B, seqlen_k, Hkv, D]``, q's dtype or float8; Hq is a multiple of Hkv.
        v: ``[B, seqlen_k, Hkv, Dv]``, k's dtype.
        dropout_p: must be 0.
        softmax_scale: factor on ``q · k``; None: ``D ** -0.5``.
        causal: a query sees no key after its own position.
        window_size: ``(left, right)`` keys seen besides the query's own position; -1: no limit.
        softcap: c > 0 turns a score s into ``c * tanh(s / c)``.
        alibi_slopes: ``[Hq]`` or ``[B, Hq]``: ``-slope * |i + seqlen_k - seqlen_q - j|`` is added.
        deterministic: changes nothing: the same call always gives the same bits.
        return_attn_probs: also return ``softmax_lse`` and an empty tensor.
        s_aux, sinks: two names of ``[Hq]``, a logit in the softmax's denominator without a value.
        attention_chunk: C > 0: a query sees keys of its own aligned chunk of C positions alone.
        q_descale, k_descale, v_descale: what the values given are to be multiplied by: a float, or
            float32 ``[]``, ``[1]``, ``[Hkv]`` or ``[B, Hkv]``.
        num_splits: parts that the keys are cut into; 0: chosen here.
        qv, pack_gqa, sm_margin: must keep their defaults.

    Returns:
        ``out [B, seqlen_q, Hq, Dv]``; with ``return_attn_probs`` a tuple ``(out, softmax_lse,
        S_dmask)``: ``softmax_lse [B, Hq, seqlen_q]`` float32, ``S_dmask`` empty.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument of the wrong type, dtype, shape or range,
            one that cannot be done, or an input that requires grad while grad mode is on.
        UnsupportedError: what the device cannot do.

    Source: flash-attn's ``flash_attn_func``; FlashAttention-2 (Dao 2023).

    >>> import torch
    >>> from tritonattn.flash_attn import flash_attn_func
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> q, k, v = torch.randn(3, 2, 5, 4, 32, device=device)
    >>> out = flash_attn_func(q, k, v, causal=True)
    >>> torch.allclose(out[:, 0], v[:, 0])  # each first query sees one key
    True
    """
    f = "flash_attn_func"
    refuse(f, dropout_p=dropout_p, qv=qv, pack_gqa=pack_gqa, sm_margin=sm_margin)
    rules.flag(f, "deterministic", deterministic)
    how = options(
        f, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, num_splits=num_splits, sinks=sinks, s_aux=s_aux,
        attention_chunk=attention_chunk,
    )  # fmt: skip
    q = heads_last(f, "q", q, "[batch, seqlen_q, Hq, D]", {})
    batch, seqlen_q, _, dim = q.shape
    sizes = {0: (batch, "batch of q"), 3: (dim, "D of q")}
    k = heads_last(f, "k", k, "[batch, seqlen_k, Hkv, D]", sizes)
    seqlen_k, kv_heads = k.shape[1:3]
    sizes = {0: (batch, "batch of q"), 1: (seqlen_k, "seqlen_k of k"), 2: (kv_heads, "Hkv of k")}
    v = heads_last(f, "v", v, "[batch, seqlen_k, Hkv, Dv]", sizes)
    how |= scales(f, q, batch, kv_heads, q_descale, k_descale, v_descale)
    # A view where memory allows it, else a copy; it is small beside what attention does with it.
    rows, cu_seqlens_q = q.flatten(0, 1), every(seqlen_q, batch, q.device)
    how |= {
        "return_lse": return_attn_probs,
        "max_seqlen_q": seqlen_q,
        "max_seqlen_k": seqlen_k,
    }
    if _is_packed(k) and _is_packed(v) and k.dtype not in rules.FP8_DTYPES:
        packed = rows, k.flatten(0, 1), v.flatten(0, 1)
        sums = cu_seqlens_q, every(seqlen_k, batch, q.device)
        result = run(f, {}, api.varlen_attention, *packed, *sums, **how)
    else:  # keys whose batches lie anywhere, or float8: a cache in which each sequence is one page
        table = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
        lens = torch.full((batch,), seqlen_k, dtype=torch.int32, device=q.device)
        names = {"k_cache": "k", "v_cache": "v"}
        how["cu_seqlens_q"] = cu_seqlens_q
        result = run(f, names, api.paged_attention, rows, k, v, table, lens, **how)
    return returned(q, by_batch(result, batch, seqlen_q))


def _is_packed(x: Tensor) -> bool:
    """Whether one batch follows the other in memory."""
    return x.shape[0] == 1 or x.numel() == 0 or x.stride(0) == x.shape[1] * x.stride(1)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
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
    """``flash_attn_func`` with keys and values in one tensor ``kv``, ``[B, seqlen_k, 2, Hkv, D]``.

    >>> import torch
    >>> from tritonattn.flash_attn import flash_attn_kvpacked_func
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> q, kv = torch.randn(1, 3, 4, 32, device=device), torch.randn(1, 9, 2, 2, 32, device=device)
    >>> flash_attn_kvpacked_func(q, kv, causal=True).shape
    torch.Size([1, 3, 4, 32])
    """
    f = "flash_attn_kvpacked_func"
    k, v = split_packed(f, "kv", kv, "[batch, seqlen_k, 2, Hkv, D]", 2)
    return run(
        f, {}, flash_attn_func, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs, s_aux=s_aux, sinks=sinks,
        attention_chunk=attention_chunk, num_splits=num_splits,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
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
    """``flash_attn_func`` with all three in one tensor ``qkv``, ``[B, seqlen, 3, H, D]``.

    >>> import torch
    >>> from tritonattn.flash_attn import flash_attn_qkvpacked_func
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> qkv = torch.randn(2, 5, 3, 4, 32, device=device)
    >>> flash_attn_qkvpacked_func(qkv).shape
    torch.Size([2, 5, 4, 32])
    """
    f = "flash_attn_qkvpacked_func"
    q, k, v = split_packed(f, "qkv", qkv, "[batch, seqlen, 3, H, D]", 2)
    return run(
        f, {}, flash_attn_func, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs, s_aux=s_aux, sinks=sinks,
        attention_chunk=attention_chunk, num_splits=num_splits,
    )  # fmt: skip
