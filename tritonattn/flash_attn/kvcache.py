"""``flash_attn_with_kvcache``: rotate and append new tokens, then attend to the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import api, rules
from ..call import Call, Scale
from ..kv_cache import write_kv_cache
from ..validate import validate
from .append import as_token_pages, place
from .cache_arguments import cached_lengths, new_tokens, page_ids, rotary, starts_of, vector
from .common import Window, bound, by_batch, either, every, heads_last, options, refuse, run, scales
from .rotary import positions, rotate

Result = Tensor | tuple[Tensor, Tensor]

_NAMES = {"seq_lens": "cache_seqlens", "return_lse": "return_softmax_lse"}


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    attention_chunk: int = 0,
    q_descale: Scale = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    qv: None = None,
    pack_gqa: None = None,
    sm_margin: int = 0,
    scheduler_metadata: None = None,
) -> Result:
    """Attention over a cache, to which new keys and values are appended first.

    Masks are aligned to the last key, new ones included.

    Args:
        q: ``[B, seqlen_q, Hq, D]``, float16, bfloat16 or float32; with ``cu_seqlens_q``
            ``[total_q, Hq, D]``.
        k_cache: ``[B_cache, capacity, Hkv, D]``, or with ``block_table`` ``[num_pages, page_size,
            Hkv, D]``; q's dtype or float8, any strides but 1 on the last axis.  Appended to in
            place.
        v_cache: the same with Dv.
        k, v: ``[B, seqlen_new, Hkv, D]`` and ``[..., Dv]``, q's dtype: new tokens, which go behind
            the first ``cache_seqlens`` of the cache; with ``cu_seqlens_k_new`` ``[total_new, Hkv,
            D]``.  Those past the end of the cache are not written.
        rotary_cos, rotary_sin: ``[rows, R]``, any float dtype, ``2 R <= D``: k is rotated at
            ``cache_seqlens + t``; so is q if ``causal`` or a side of the window is limited, else
            all its rows at ``cache_seqlens``.  Only together with k and v, and with a row for each
            token that the cache can hold.
        cache_seqlens: ``[B]`` int32 or an int, the tokens in the cache, left padding included and
            new ones not; below 0: nothing is written, and the sequence's output is 0.  None: the
            cache is full.
        cache_batch_idx: ``[B]`` int32 or int64: which row of the cache, or of ``block_table``, is a
            sequence's.  None: its own number.
        cache_leftpad: ``[B]`` int32: the first so many tokens are not attended to.
        block_table, page_table: two names of ``[B, max_pages]`` int32 or int64, the ids of each
            sequence's pages in order.
        rotary_interleaved: whether dims ``(2i, 2i + 1)`` make a pair, else ``(i, i + R)``.
        return_softmax_lse: also return ``softmax_lse``.
        cu_seqlens_q: ``[B + 1]`` int32: the queries are packed.
        cu_seqlens_k_new: ``[B + 1]`` int32: the new keys and values are packed.
        max_seqlen_q: a bound on the packed queries of a sequence, which changes no result.
        rotary_seqlens: ``[B]`` int32: the position of the first new token, in place of
            ``cache_seqlens``, for the rotation alone.
        k_descale, v_descale: true value = stored value x scale, also of what is appended (then not
            ``[B, Hkv]``).
        qv, pack_gqa, sm_margin, scheduler_metadata: must keep their defaults.

    The other arguments, and what is raised: ``flash_attn_func``.  A call that is refused has
    written nothing.

    Returns:
        ``out [B, seqlen_q, Hq, Dv]``, with ``cu_seqlens_q`` ``[total_q, Hq, Dv]``; with
        ``return_softmax_lse`` also ``softmax_lse``, ``[B, Hq, seqlen_q]`` or ``[Hq, total_q]``.

    Source: flash-attn's ``flash_attn_with_kvcache``; Flash-Decoding (Dao et al. 2023).

    >>> import torch
    >>> from tritonattn.flash_attn import flash_attn_with_kvcache
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> k_cache, v_cache = torch.zeros(2, 2, 64, 1, 32, device=device)  # 2 sequences of up to 64
    >>> q, k, v = torch.randn(3, 2, 1, 1, 32, device=device)  # one new token each
    >>> lengths = torch.tensor([0, 5], dtype=torch.int32, device=device)
    >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
    >>> torch.equal(k_cache[1, 5], k[1, 0]), torch.allclose(out[0], v[0])
    (True, True)
    """
    f = "flash_attn_with_kvcache"
    refuse(f, qv=qv, pack_gqa=pack_gqa, sm_margin=sm_margin, scheduler_metadata=scheduler_metadata)
    how = options(
        f, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, num_splits=num_splits, sinks=sinks, s_aux=s_aux,
        attention_chunk=attention_chunk,
    )  # fmt: skip
    table = either(f, "block_table", block_table, "page_table", page_table)
    if cu_seqlens_q is None:
        q = heads_last(f, "q", q, "[batch, seqlen_q, Hq, D]", {})
        batch, seqlen_q = q.shape[:2]
    else:
        q = heads_last(f, "q", q, "[total_q, Hq, D]", {})
        batch, seqlen_q = starts_of(f, "cu_seqlens_q", cu_seqlens_q, None, q.device), 0
    device = q.device
    kv_heads, _ = rules.kv_pages(f, k_cache, v_cache, device)
    how |= scales(f, q, batch, kv_heads, q_descale, k_descale, v_descale)
    table = page_ids(f, table, cache_batch_idx, batch, k_cache)
    capacity = table.shape[1] * k_cache.shape[1]
    new = new_tokens(f, k, v, cu_seqlens_k_new, batch, k_cache, v_cache)
    cached = cached_lengths(f, cache_seqlens, batch, capacity, new, device)
    turn = rotary(
        f, rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens, new, cached, capacity, q
    )

    how |= {"q": q, "seq_lens": cached, "return_lse": return_softmax_lse}
    how |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": bound(max_seqlen_q)}
    if cu_seqlens_q is None:
        how |= {"q": q.flatten(0, 1), "max_seqlen_q": seqlen_q}
        if seqlen_q != 1:
            how["cu_seqlens_q"] = every(seqlen_q, batch, device)
    if isinstance(cache_seqlens, int) and (new is None or new.starts is None):
        how["max_seqlen_k"] = cache_seqlens + (0 if new is None else new.length)
    pages = k_cache, v_cache, table
    if cache_leftpad is not None:
        vector(f, "cache_leftpad", cache_leftpad, batch, device)
        pages = as_token_pages(f, *pages, cache_leftpad)
    how |= dict(zip(("k_cache", "v_cache", "block_table"), pages, strict=True))

    if new is not None and batch > 0:
        if not torch.compiler.is_compiling():  # before anything is written
            run(f, _NAMES, validate, Call("paged_attention", **how))
        k, rows = new.k, how["q"]
        if turn is not None:
            sides = window_size or ()
            is_local = causal or any(side is not None and side >= 0 for side in sides)
            which = cu_seqlens_q, seqlen_q, rows.shape[0]
            how["q"] = rotate(rows, turn, positions(turn.start, *which, is_local))
            which = new.starts, new.length, k.shape[0]
            k = rotate(k, turn, positions(turn.start, *which, True))
        where = new.starts, new.length, k.shape[0], table, k_cache.shape[1]
        slots, how["seq_lens"] = place(cached, *where)
        stored = {"k_scale": k_descale, "v_scale": v_descale}
        run(f, _NAMES, write_kv_cache, k, new.v, k_cache, v_cache, slots, **stored)
    if cache_leftpad is not None:
        how["seq_lens"] = how["seq_lens"] - cache_leftpad
    result = run(f, _NAMES, api.paged_attention, **how)
    return result if cu_seqlens_q is not None else by_batch(result, batch, seqlen_q)
