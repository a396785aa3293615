"""Sequences packed in one row: continuous batching (``generate_batch``) and padding-free batches.

Lengths are taken as they come, on the GPU: rows past ``cu_seq_lens_q[-1]`` are padding and become
0, a key length below 0 counts as 0, and ``max_length_*`` are bounds that change no result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import varlen_attention
from ..errors import Text, bad_value
from ..flash_attn import flash_attn_with_kvcache
from . import transformers_versions as versions
from .transformers_masks import speaks_of_tokens
from .transformers_routes import FUNCTION, packed_rows


def attend_packed(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
    kwargs: dict[str, Any],
) -> Tensor:
    """``[batch, queries, heads, value dim]``, the sequences being cut by ``cu_seq_lens_q``.

    With a cache of continuous batching in ``kwargs``, what is new is written to it first.
    """
    if mask is not None and speaks_of_tokens(mask):
        rule = "must be None together with cu_seq_lens_q, which cuts the row into sequences"
        fix = "Pass one of them; a padding-free batch has no padding to mask."
        raise bad_value(FUNCTION, "attention_mask", rule, mask, fix)
    key, value, kwargs = versions.update_paged_cache(module, key, value, kwargs)
    batch, heads, num_queries, _ = query.shape
    if kwargs.get("block_table") is not None:
        appended = _decode(query, key, value, options, kwargs)
        return appended.reshape(batch, num_queries, heads, -1)
    starts_q, starts_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    out = varlen_attention(
        packed_rows(query), packed_rows(key), packed_rows(value),
        starts_q.to(torch.int32), starts_k.to(torch.int32),
        max_seqlen_q=_bound(kwargs, "q"), max_seqlen_k=_bound(kwargs, "k"), **options,
    )  # fmt: skip
    return out.view(batch, num_queries, heads, -1)  # type: ignore[union-attr]


def _decode(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], kwargs: dict[str, Any]
) -> Tensor:
    """One query a sequence; the new token is appended to the pages that ``block_table`` names."""
    k_cache = kwargs.get("k_cache")
    if k_cache is None:
        rule = "must come with k_cache and v_cache"
        got = Text("block_table alone")
        raise bad_value(FUNCTION, "block_table", rule, got, "Use transformers 5.19 or later.")
    query, key, value = (packed_rows(x)[:, None] for x in (query, key, value))
    # Lengths count the new token, which is not in the cache yet; those of padding become -1.
    lengths = kwargs["cu_seq_lens_k"].to(torch.int32).diff()[: query.shape[0]] - 1
    chunk = options["chunk_size"]
    out = flash_attn_with_kvcache(
        query, k_cache, kwargs["v_cache"], key, value,
        cache_seqlens=lengths,
        block_table=kwargs["block_table"],
        softmax_scale=options["softmax_scale"],
        causal=options["causal"],
        window_size=options["window_size"] or (-1, -1),
        softcap=options["softcap"],
        s_aux=options["sinks"],
        attention_chunk=0 if chunk is None else chunk,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def _bound(kwargs: dict[str, Any], side: str) -> int | None:
    """A number that the host knows; one on the GPU is not worth waiting for."""
    bound = kwargs.get(f"max_length_{side}", kwargs.get(f"max_seqlen_{side}"))
    return bound if isinstance(bound, int) else None
