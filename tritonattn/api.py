"""The public attention functions.

Each gives ``attend`` the fields of a Call, in their order, and every call goes one way from there:
validate, plan, configure, launch.  The options, their defaults and what they mean are the same for
all three; ``varlen_attention`` describes them.

Names: B sequences, ``total_q`` query rows of all of them packed one after another, Hq query heads,
Hkv KV heads (Hq a multiple of Hkv: query head h reads KV head ``h // (Hq // Hkv)``), D dims a head
(up to 576), Dv dims a value (up to 512), any size, powers of two or not.
"""

from __future__ import annotations

import torch

from .attend import attend
from .call import Result, Scale, Window


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: Window | None = None,
    chunk_size: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    query_scale: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
) -> Result:
    """Attention of packed queries over packed keys and values: prefill without a cache, encoders.

    Sequence b has the queries ``q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]]`` and the keys and values
    ``k[cu_seqlens_k[b]:cu_seqlens_k[b + 1]]``, ``v`` likewise.  With lq queries and lk keys, row i
    stands at position ``pos = i + lk - lq``: the last query stands on the last key.

    Args:
        q: ``[total_q, Hq, D]``, float16, bfloat16 or float32.  This and every tensor below: on q's
            device, any strides but 1 on the last axis.
        k: ``[total_k, Hkv, D]``, q's dtype.
        v: ``[total_k, Hkv, Dv]``, q's dtype.
        cu_seqlens_q: ``[B + 1]`` int32, prefix sums of the sequences' numbers of queries.
        cu_seqlens_k: ``[B + 1]`` int32, prefix sums of their numbers of keys.
        max_seqlen_q: no sequence has more queries.  Bounds help to choose a configuration and never
            change what is computed; None: known from the shapes alone.
        max_seqlen_k: no sequence has more keys, cached and new ones together.
        softmax_scale: factor on ``q · k``; None: ``D ** -0.5``.  0 and negative values are valid.
        causal: key j is visible only if ``j <= pos``.
        window_size: ``(left, right)``, visible only if ``pos - left <= j <= pos + right``, in
            tokens; -1 or None on a side: no limit.  A sliding window of W tokens, the query's own
            counted, is ``(W - 1, 0)``.  Under ``causal`` a right side changes nothing.
        chunk_size: C tokens; visible only if ``j // C == pos // C`` (chunked attention, Llama 4).
        softcap: c > 0 turns the scaled logit s into ``c * tanh(s / c)`` (Gemma 2); 0.0: no cap.
        alibi_slopes: ``[Hq]`` or ``[B, Hq]``, any float dtype, used as float32: after the cap,
            ``-slope * |pos - j|`` is added (ALiBi, Press et al. 2022; ``tritonattn.alibi_slopes``
            makes them).
        sinks: ``[Hq]``, any float dtype: one more logit a head in the softmax's denominator,
            without a value; it is not scaled, capped, biased or masked (GPT-OSS).
        query_scale: ``[total_q]`` float32, a factor on each row's logits before the cap (attention
            temperature, Llama 4; ``tritonattn.attention_temperature`` makes it).
        tree_mask: ``[total_q, max_seqlen_q]`` bool: of its sequence's last lq keys, query row r
            sees the t-th iff ``tree_mask[r, t]``, in place of the causal rule, which must be on;
            earlier keys stay visible, windows and chunks still apply (speculative trees,
            SpecInfer, Miao et al. 2024).
        k_scale: a stored key times this is the true one: a float, or float32 of shape ``[]``,
            ``[1]``, ``[Hkv]`` or ``[B, Hkv]``.  In ``prefix_attention`` for cached keys alone.
        v_scale: the same for values.
        return_lse: also return the log-sum-exp of each row's logits.
        out: ``[total_q, Hq, Dv]``, float16, bfloat16 or float32: written and returned.
        num_splits: parts that a sequence's keys are cut into, up to 256; 0: chosen here.
        batch_invariant: a sequence's bits do not depend on what else is in the batch.

    Returns:
        ``out``, ``[total_q, Hq, Dv]`` in q's dtype unless given; with ``return_lse`` also ``lse``,
        ``[Hq, total_q]`` float32, in natural logarithms, the sink included.  Every row is written:
        one that sees no key is 0, its lse -inf (its sink, where there are sinks); rows past
        ``cu_seqlens_q[-1]``, such as a graph's padding, are 0, their lse -inf.

    Raises:
        ArgumentTypeError: a wrong type or dtype (a TypeError).
        ArgumentValueError: a wrong shape, stride, device or range, options that contradict, or an
            input that requires grad while grad mode is on (a ValueError).
        UnsupportedError: what the device cannot do (a RuntimeError).

    No value on the device, such as a length or a page id, is checked, as that would wait for the
    device; with TRITONATTN_CHECK=1 in the environment each call does so.

    Source: FlashAttention-2 (Dao 2023) and FlashAttention-3 (Shah et al. 2024); grouped heads,
    Ainslie et al. 2023.

    >>> import torch, tritonattn
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> q = torch.randn(5, 4, 64, device=device)
    >>> k, v = torch.randn(2, 9, 2, 64, device=device)
    >>> cu_seqlens_q = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)  # 3 and 2 queries
    >>> cu_seqlens_k = torch.tensor([0, 3, 9], dtype=torch.int32, device=device)  # 3 and 6 keys
    >>> out = tritonattn.varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k)
    >>> torch.allclose(out[0, 0], v[0, 0])  # the first query of the first sequence sees one key
    True
    """
    return attend(
        "varlen_attention",
        q, k, v, None, None, None, None, cu_seqlens_q, cu_seqlens_k, None, None,
        max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, chunk_size,
        softcap, alibi_slopes, sinks, query_scale, tree_mask, k_scale, v_scale, return_lse, out,
        num_splits, batch_invariant,
    )  # fmt: skip


def prefix_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    block_indptr: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: Window | None = None,
    chunk_size: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    query_scale: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
) -> Result:
    """Attention of new tokens over a paged cache and themselves: prefill after a cached prefix.

    The keys of sequence b are its first ``context_lens[b]`` cached tokens, then its new rows of
    ``k`` and ``v``, which are those of its queries, ``cu_seqlens_q[b]:cu_seqlens_q[b + 1]``.  The
    new rows need not be in the cache yet.  Masks as in ``varlen_attention``, with lk the cached and
    the new tokens together.

    Args:
        q: ``[total_q, Hq, D]``, float16, bfloat16 or float32, with stride 1 on its last axis.
        k: ``[total_q, Hkv, D]``, q's dtype: one new key for each query row.
        v: ``[total_q, Hkv, Dv]``, q's dtype.
        k_cache: ``[num_pages, page_size, Hkv, D]``, q's dtype or float8 (e4m3fn, e5m2, e4m3fnuz,
            e5m2fnuz).  Any page_size from 1; any strides but 1 on the last axis, so views of pools
            laid out otherwise will do.
        v_cache: ``[num_pages, page_size, Hkv, Dv]``, the dtype of k_cache.
        block_table: ``[B, max_pages]`` int32 or int64, ids of a sequence's pages in order; what
            lies past its length is never followed.  With ``block_indptr``: ``[total_pages]``, flat.
        cu_seqlens_q: ``[B + 1]`` int32, prefix sums of the numbers of new tokens.
        context_lens: ``[B]`` int32, tokens in the cache before the new ones; below 0 counts as 0.
        block_indptr: ``[B + 1]`` int32, where a sequence's ids start in a flat ``block_table``.

    The options, what is returned, what an empty row gets, and what is raised: ``varlen_attention``.
    ``k_scale`` and ``v_scale`` apply to the cached tokens alone.

    Source: PagedAttention (Kwon et al. 2023), chunked prefill (SARATHI, Agrawal et al. 2023).

    >>> import torch, tritonattn
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> q = torch.randn(3, 4, 64, device=device)
    >>> k, v = torch.randn(2, 3, 2, 64, device=device)  # three new tokens of one sequence
    >>> k_cache, v_cache = torch.randn(2, 8, 16, 2, 64, device=device)  # 8 pages of 16 tokens
    >>> block_table = torch.tensor([[5, 2]], dtype=torch.int32, device=device)
    >>> cu_seqlens_q = torch.tensor([0, 3], dtype=torch.int32, device=device)
    >>> context_lens = torch.tensor([20], dtype=torch.int32, device=device)  # page 5, a part of 2
    >>> out = tritonattn.prefix_attention(
    ...     q, k, v, k_cache, v_cache, block_table, cu_seqlens_q, context_lens
    ... )
    >>> out.shape
    torch.Size([3, 4, 64])
    """
    return attend(
        "prefix_attention",
        q, k, v, k_cache, v_cache, block_table, block_indptr, cu_seqlens_q, None, context_lens,
        None, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, chunk_size,
        softcap, alibi_slopes, sinks, query_scale, tree_mask, k_scale, v_scale, return_lse, out,
        num_splits, batch_invariant,
    )  # fmt: skip


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    block_indptr: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: Window | None = None,
    chunk_size: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    query_scale: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
) -> Result:
    """Attention over a paged cache that holds all keys: decode, speculation, chunked prefill.

    The keys of sequence b are its first ``seq_lens[b]`` tokens in the cache, the new ones included
    (``write_kv_cache`` puts them there).  One call may mix sequences of one query with sequences of
    several.  Masks as in ``varlen_attention``.

    Args:
        q: ``[total_q, Hq, D]``, float16, bfloat16 or float32, with stride 1 on its last axis;
            ``[B, Hq, D]`` where ``cu_seqlens_q`` is None.
        k_cache, v_cache, block_table, block_indptr: as in ``prefix_attention``.  Where v_cache is a
            view of k_cache's first dims (latent attention), both are loaded once.
        seq_lens: ``[B]`` int32, tokens in the cache; below 0 counts as 0.
        cu_seqlens_q: ``[B + 1]`` int32, prefix sums of the numbers of queries; None: one each.

    The options, what is returned, what an empty row gets, and what is raised: ``varlen_attention``.

    Source: PagedAttention (Kwon et al. 2023), splits along the keys from Flash-Decoding (Dao et al.
    2023).

    >>> import torch, tritonattn
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> q = torch.randn(2, 4, 64, device=device)
    >>> k_cache, v_cache = torch.randn(2, 8, 16, 2, 64, device=device)  # 8 pages of 16 tokens
    >>> block_table = torch.tensor([[5, 2], [3, -1]], dtype=torch.int32, device=device)
    >>> seq_lens = torch.tensor([20, 1], dtype=torch.int32, device=device)
    >>> out = tritonattn.paged_attention(q, k_cache, v_cache, block_table, seq_lens)
    >>> torch.allclose(out[1, 3], v_cache[3, 0, 1])  # one key: its value
    True
    """
    return attend(
        "paged_attention",
        q, None, None, k_cache, v_cache, block_table, block_indptr, cu_seqlens_q, None, None,
        seq_lens, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, chunk_size,
        softcap, alibi_slopes, sinks, query_scale, tree_mask, k_scale, v_scale, return_lse, out,
        num_splits, batch_invariant,
    )  # fmt: skip
