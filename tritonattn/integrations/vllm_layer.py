"""The attention of one layer of a vLLM model, and what it is told of a batch: see ``vllm``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import vllm.envs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadata, AttentionType

from ..api import paged_attention, varlen_attention
from ..errors import Text, unsupported
from ..kv_cache import write_kv_cache

ATTN_TYPES = (AttentionType.DECODER, AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
OTHER_BACKEND = "Choose another backend for this model with --attention-backend."


@dataclass
class TritonAttnMetadata(AttentionMetadata):
    """A batch as vLLM has it; the tensors are vLLM's own, so a captured graph sees new values."""

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    seq_lens: torch.Tensor  # [num_reqs] int32
    block_table: torch.Tensor  # [num_reqs, max_blocks] int32
    slot_mapping: torch.Tensor  # [num_tokens] int64
    causal: bool = True


class TritonAttnImpl(AttentionImpl[TritonAttnMetadata]):
    """One layer: ``do_kv_cache_update`` writes the new keys, ``forward`` attends to all."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type not in ATTN_TYPES:
            rule = "must be decoder, encoder or encoder_only"
            got = Text(getattr(attn_type, "value", attn_type))
            raise unsupported("TritonAttnImpl", "attn_type", rule, got, OTHER_BACKEND)
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            rule = f"must be one of {', '.join(KV_CACHE_DTYPES)}"
            fix = "Pass --kv-cache-dtype auto or fp8."
            raise unsupported("TritonAttnImpl", "kv_cache_dtype", rule, kv_cache_dtype, fix)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = sliding_window
        self.is_encoder = attn_type != AttentionType.DECODER
        self.fp8_dtype: torch.dtype | None = None
        if kv_cache_dtype.startswith("fp8"):
            is_e5m2 = kv_cache_dtype == "fp8_e5m2"
            self.fp8_dtype = torch.float8_e5m2 if is_e5m2 else current_platform.fp8_dtype()
        self.alibi_slopes = None
        if alibi_slopes is not None:
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = sinks
        self.options: dict[str, Any] = {
            "softmax_scale": self.scale,
            "softcap": float(logits_soft_cap or 0.0),
            "batch_invariant": bool(vllm.envs.VLLM_BATCH_INVARIANT),
        }
        if sliding_window is not None:
            right = sliding_window - 1 if self.is_encoder else 0
            self.options["window_size"] = (sliding_window - 1, right)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttnMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``query [num_tokens, Hq, D]`` to ``output [num_tokens, Hq, Dv]``, which is returned.

        Rows of padding are written as 0.  ``key`` and ``value`` are in the cache already; an
        encoder has none and attends to them as they are.
        """
        for name, given in (
            ("output_scale", output_scale),
            ("output_block_scale", output_block_scale),
        ):
            if given is not None:
                rule = "must be None: outputs are not quantised here"
                fix = "Switch the fusion of attention and quantisation off."
                raise unsupported("TritonAttnImpl.forward", name, rule, given, fix)
        options = {**self.options, **self._on(query.device)}
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        options["out"] = output.view(query.shape[0], self.num_heads, -1)
        options["max_seqlen_q"] = attn_metadata.max_query_len
        options["max_seqlen_k"] = attn_metadata.max_seq_len
        starts = attn_metadata.query_start_loc
        if self.is_encoder:
            varlen_attention(query, key, value, starts, starts, causal=False, **options)
            return output
        k_cache, v_cache = self._pages(kv_cache)
        paged_attention(
            query, k_cache, v_cache, attn_metadata.block_table, attn_metadata.seq_lens,
            cu_seqlens_q=starts, causal=attn_metadata.causal, **options, **self._scales(layer),
        )  # fmt: skip
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if not self.is_encoder:
            k_cache, v_cache = self._pages(kv_cache)
            write_kv_cache(key, value, k_cache, v_cache, slot_mapping, **self._scales(layer))

    def _pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[num_blocks, Hkv, block_size, D + Dv]`` as pages of keys and pages of values."""
        if self.fp8_dtype is not None:
            kv_cache = kv_cache.view(self.fp8_dtype)
        pages = kv_cache.transpose(1, 2)
        return pages[..., : self.head_size], pages[..., self.head_size :]

    def _scales(self, layer: Any) -> dict[str, Any]:
        """None for a 16-bit cache, whose values keep their bits."""
        if self.fp8_dtype is None:
            return {}
        return {"k_scale": layer._k_scale, "v_scale": layer._v_scale}

    def _on(self, device: torch.device) -> dict[str, torch.Tensor | None]:
        """Slopes and sinks where the queries are: moved at the first run, which is no capture."""
        if self.alibi_slopes is not None and self.alibi_slopes.device != device:
            self.alibi_slopes = self.alibi_slopes.to(device)
        if self.sinks is not None and self.sinks.device != device:
            self.sinks = self.sinks.to(device)
        return {"alibi_slopes": self.alibi_slopes, "sinks": self.sinks}
