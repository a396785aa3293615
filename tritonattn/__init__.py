"""Attention for LLM inference in Triton: varlen prefill, prefix-cache attention, paged decode."""

from . import torch_ops as _torch_ops  # noqa: F401 (importing it registers the operators)
from .api import paged_attention, prefix_attention, varlen_attention
from .errors import ArgumentTypeError, ArgumentValueError, TritonAttnError, UnsupportedError
from .extras import alibi_slopes, attention_temperature
from .kv_cache import copy_blocks, gather_kv_cache, swap_blocks, write_kv_cache
from .merge import merge_states
from .warmup import warmup

__version__ = "0.1.0"

__all__ = [
    "ArgumentTypeError",
    "ArgumentValueError",
    "TritonAttnError",
    "UnsupportedError",
    "alibi_slopes",
    "attention_temperature",
    "copy_blocks",
    "gather_kv_cache",
    "merge_states",
    "paged_attention",
    "prefix_attention",
    "swap_blocks",
    "varlen_attention",
    "warmup",
    "write_kv_cache",
]
