"""What the backend touches of vLLM, as its interface is documented (0.26 to 0.33): a stand-in.

vLLM takes gigabytes and a GPU to install, so tests run on this where it is missing, and on vLLM
itself where it is there (``loaded``).  Only what the backend inherits, is asked or asks is here;
the abstract methods are those of vLLM, ``get_kv_cache_shape`` of the older versions among them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionBackend(ABC):
    supported_dtypes = (torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes = ("auto",)
    forward_includes_kv_cache_update = True

    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"
    ): ...

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size):
        return True

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability):
        return True

    @classmethod
    def supports_combination(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse,
        use_mm_prefix, device_capability,
    ):  # fmt: skip
        return None

    @classmethod
    def validate_configuration(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse,
        use_mm_prefix, use_per_head_quant_scales, device_capability, attn_type,
        has_sliding_window=False, use_non_causal=False, use_batch_invariant=False, use_dcp=False,
    ):  # fmt: skip
        """Reasons against; vLLM refuses a backend that has any."""

        def supports(what):
            return getattr(cls, f"supports_{what}", lambda: False)()

        wanted = {
            "MLA": use_mla,
            "sparse": use_sparse,
            "mm_prefix": use_mm_prefix and not supports("mm_prefix"),
            "DCP": use_dcp,
            "sinks": has_sink and not supports("sink"),
            "window": has_sliding_window and not supports("sliding_window"),
            "non-causal": use_non_causal and not supports("non_causal"),
            "invariance": use_batch_invariant and not supports("batch_invariance"),
            "scales": use_per_head_quant_scales and not supports("per_head_quant_scales"),
            "head_size": not cls.supports_head_size(head_size),
            "dtype": dtype not in cls.supported_dtypes,
            "kv_cache_dtype": kv_cache_dtype not in (None, *cls.supported_kv_cache_dtypes),
            "compute capability": not cls.supports_compute_capability(device_capability),
            f"attention type {attn_type}": not cls.supports_attn_type(attn_type),
        }
        reasons = [f"{name} not supported" for name, refused in wanted.items() if refused]
        combination = cls.supports_combination(
            head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse,
            use_mm_prefix, device_capability,
        )  # fmt: skip
        return reasons + ([] if combination is None else [combination])


class AttentionMetadata:
    pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True
    encoder_seq_lens: torch.Tensor | None = None
    dcp_local_seq_lens: torch.Tensor | None = None
    mm_req_doc_ranges: Any = None
    rswa_prefix_lens: torch.Tensor | None = None


class AttentionMetadataBuilder(ABC, Generic[T]):
    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = False

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.device = device

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
        return cls._cudagraph_support

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    def update_block_table(self, metadata, blk_table, slot_mapping):
        raise NotImplementedError

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(0, common_attn_metadata)


class AttentionImpl(ABC, Generic[T]):
    @abstractmethod
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None,
        sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=None,
        attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None,
    ): ...  # fmt: skip

    @abstractmethod
    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
        output_block_scale=None,
    ): ...  # fmt: skip


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    def get_path(self):
        return _OVERRIDES[self]

    def is_overridden(self):
        return self in _OVERRIDES

    def clear_override(self):
        _OVERRIDES.pop(self, None)

    def get_class(self):
        module, _, name = self.get_path().rpartition(".")
        return getattr(importlib.import_module(module), name)


_OVERRIDES: dict[AttentionBackendEnum, str] = {}


def register_backend(backend, class_path=None, is_mamba=False):
    _OVERRIDES[backend] = class_path


def _modules() -> dict[str, ModuleType]:
    attention = (
        AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadata,
        AttentionMetadataBuilder, AttentionType, CommonAttentionMetadata, MultipleOf,
    )  # fmt: skip
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.platforms": {
            "current_platform": SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn)
        },
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {x.__name__: x for x in attention},
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": AttentionBackendEnum, "register_backend": register_backend,
        },
        "vllm.v1.attention.backends.utils": {"get_kv_cache_layout": lambda: "NHD"},
    }  # fmt: skip
    modules = {}
    for name, values in contents.items():
        modules[name] = module = ModuleType(name)
        vars(module).update(values)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    return modules


@contextmanager
def loaded() -> Iterator[ModuleType]:
    """``tritonattn.integrations.vllm`` on vLLM, or on this stand-in, which then goes away again."""
    name = "tritonattn.integrations.vllm"
    if importlib.util.find_spec("vllm") is not None:
        yield importlib.import_module(name)
        return
    modules = _modules()
    sys.modules.update(modules)
    try:
        yield importlib.import_module(name)
    finally:
        _OVERRIDES.clear()
        for gone in (*modules, name, f"{name}_layer"):
            sys.modules.pop(gone, None)
