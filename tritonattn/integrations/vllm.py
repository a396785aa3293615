"""An attention backend for vLLM, from outside its tree: ``--attention-backend CUSTOM``.

``pip install tritonattn`` beside vLLM is all: the entry point ``vllm_plugin.register`` makes
``TritonAttnBackend`` vLLM's CUSTOM.  It follows the v1 interface (``vllm.v1.attention.backend``) of
vLLM 0.33, and meets that of 0.26; older versions may shape their caches in other ways.

All that vLLM passes to an attention layer is done by the kernels, in every combination: scale,
grouped heads, ALiBi slopes, sliding window, logits soft cap, sinks, float8 caches with a scale a
tensor or a head, non-causal batches, batch invariance, head sizes up to 512, blocks of any size,
chunked prefill mixed with decodes, speculative checks, encoders.  Every batch can be captured in a
CUDA graph.  Cascade attention is off.  What is not done is refused, by vLLM itself where it asks
beforehand (``validate_configuration``), else by an UnsupportedError that gives the reason: latent
attention (MLA), sparse attention, context parallelism, cross attention, ALiBi by square roots,
masks that differ by request, fused quantisation of the output.

vLLM's layers for Llama 4 cut sequences into virtual batches of a chunk each before any backend is
asked; they work with this one as with others.  The cache is vLLM's own, ``[num_blocks, Hkv,
block_size, D + Dv]`` in any memory layout, keys and values side by side: both are views of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)

from ..errors import unsupported
from ..rules import MAX_HEAD_DIM_V
from .vllm_layer import (
    ATTN_TYPES,
    KV_CACHE_DTYPES,
    OTHER_BACKEND,
    TritonAttnImpl,
    TritonAttnMetadata,
)
from .vllm_plugin import register

__all__ = [
    "TritonAttnBackend",
    "TritonAttnImpl",
    "TritonAttnMetadata",
    "TritonAttnMetadataBuilder",
    "register",
]


class TritonAttnBackend(AttentionBackend):
    """What vLLM asks before it chooses a backend, and the classes that make it up."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = False
    supports_kv_cache_update_bypass: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(KV_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # the member of vLLM's enum, by which it looks the backend up

    @staticmethod
    def get_impl_cls() -> type[TritonAttnImpl]:
        return TritonAttnImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttnMetadataBuilder]:
        return TritonAttnMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Asked for by versions that do not compute it themselves."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The user's layout (VLLM_KV_CACHE_LAYOUT): kernels read tokens first and heads first."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        if get_kv_cache_layout() == "HND":
            return (1, 2, 0, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= MAX_HEAD_DIM_V

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in ATTN_TYPES

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return (capability.major, capability.minor) >= (7, 5)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        if dtype == torch.bfloat16 and device_capability.major < 8:
            return "bfloat16 needs a GPU of compute capability 8.0; float16 works here"
        if kv_cache_dtype in ("float16", "bfloat16") and getattr(torch, kv_cache_dtype) != dtype:
            return f"a cache of {kv_cache_dtype} needs a model of it; auto takes the model's dtype"
        return None

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True


class TritonAttnMetadataBuilder(AttentionMetadataBuilder[TritonAttnMetadata]):
    """Hands vLLM's tensors on.  The kernels take lengths from them alone: no host copy, no plan."""

    # Grids follow from the sizes of buffers, and bounds on lengths change no result.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table: bool = True
    supports_draft_decode_metadata_update: bool = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonAttnMetadata:
        common = common_attn_metadata
        for name, why, way_out in _REFUSED:
            value = getattr(common, name, None)
            if isinstance(value, torch.Tensor) if name == "causal" else value is not None:
                raise unsupported("TritonAttnMetadataBuilder.build", name, why, value, way_out)
        return TritonAttnMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=int(common.max_query_len),  # of chunked layers they are numpy's
            max_seq_len=int(common.max_seq_len),
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
        )

    def update_block_table(
        self, metadata: TritonAttnMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> TritonAttnMetadata:
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)

    def update_draft_decode_metadata(self, metadata: TritonAttnMetadata) -> None:
        """Nothing to do: the metadata refers to vLLM's persistent buffers."""


_REFUSED = (
    ("causal", "must be one bool for the whole batch", OTHER_BACKEND),
    ("mm_req_doc_ranges", "must be None: no image is attended both ways", OTHER_BACKEND),
    ("rswa_prefix_lens", "must be None: no window keeps a prefix in sight", OTHER_BACKEND),
    ("encoder_seq_lens", "must be None: there is no cross attention", OTHER_BACKEND),
    ("dcp_local_seq_lens", "must be None: no sequence is split among ranks", OTHER_BACKEND),
)
