"""The attention layer of early vLLM (0.4.2) on tritonattn: its interface, without its gaps.

``Attention.forward`` takes what that layer took: tokens in one row, ``|prompts|decodes|padding|``,
heads flattened, a cache ``[2, num_blocks, block_size * Hkv * D]``, and metadata under the old
names.  ``attention_layer.py`` beside this file shows everything that it can do.

The cache holds K and V as pages ``[num_blocks, block_size, Hkv, D]``, which are views of it.  The
old kernels kept them packed (``split_packed_kv_cache``); ``from_packed`` and ``to_packed`` turn
such a cache into this one and back in place, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import tritonattn
from tritonattn import paged_attention, prefix_attention, varlen_attention, write_kv_cache
from tritonattn.integrations.packed_cache import pack_kv_cache, unpack_kv_cache

FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class AttentionMetadata:
    """What a step's sequences are: the prompts first, then the decodes, one token each.

    Frozen: the layer reads it and keeps nothing on it.  In brackets, what tritonattn calls it.
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decode_tokens: int
    slot_mapping: torch.Tensor  # [num_tokens]; padding has -1
    seq_lens: list[int]  # a copy on the host, for schedulers; the layer does not need it
    seq_lens_tensor: torch.Tensor  # [B] (seq_lens)
    max_query_len: int  # of the prompts (max_seqlen_q)
    max_seq_len: int  # of all sequences (max_seqlen_k)
    subquery_start_loc: torch.Tensor  # [B + 1] (cu_seqlens_q)
    seq_start_loc: torch.Tensor  # [num_prefills + 1] (cu_seqlens_k)
    context_lens_tensor: torch.Tensor | None  # [B] (context_lens); None: prompts have no context
    block_tables: torch.Tensor  # [B, max_blocks] (block_table)
    use_cuda_graph: bool = False  # for the caller: nothing here differs, all of it can be captured


class PagedAttention:
    """The cache's functions by their old names."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size * num_kv_heads * head_size)

    @staticmethod
    def split_kv_cache(
        kv_cache: torch.Tensor, num_kv_heads: int, head_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views ``[num_blocks, block_size, Hkv, D]`` of the keys and of the values."""
        key_cache, value_cache = kv_cache.unflatten(-1, (-1, num_kv_heads, head_size)).unbind(0)
        return key_cache, value_cache

    @staticmethod
    def split_packed_kv_cache(
        kv_cache: torch.Tensor, num_kv_heads: int, head_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The old views: K ``[blocks, Hkv, D/x, size, x]`` and V ``[blocks, Hkv, D, size]``."""
        x = 16 // kv_cache.element_size()
        key_cache = kv_cache[0].unflatten(-1, (num_kv_heads, head_size // x, -1, x))
        return key_cache, kv_cache[1].unflatten(-1, (num_kv_heads, head_size, -1))

    @staticmethod
    def from_packed(kv_cache: torch.Tensor, num_kv_heads: int, head_size: int) -> None:
        """A cache that the old kernels filled becomes this layer's, in place."""
        packed = PagedAttention.split_packed_kv_cache(kv_cache, num_kv_heads, head_size)
        kv_cache.copy_(torch.stack([x.flatten(1) for x in unpack_kv_cache(*packed)]))

    @staticmethod
    def to_packed(kv_cache: torch.Tensor, num_kv_heads: int, head_size: int) -> None:
        """This layer's cache becomes one that the old kernels read, in place."""
        pages = PagedAttention.split_kv_cache(kv_cache, num_kv_heads, head_size)
        kv_cache.copy_(torch.stack([x.flatten(1) for x in pack_kv_cache(*pages)]))

    @staticmethod
    def write_to_paged_cache(
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str = "auto",
        kv_scale: float | torch.Tensor = 1.0,
    ) -> None:
        caches = (as_stored(x, kv_cache_dtype) for x in (key_cache, value_cache))
        write_kv_cache(key, value, *caches, slot_mapping, **scales(kv_scale))

    @staticmethod
    def copy_blocks(
        kv_caches: Sequence[torch.Tensor], src_to_dists: Mapping[int, Sequence[int]]
    ) -> None:
        """Within each layer's cache, block ``src`` to all blocks ``src_to_dists[src]``."""
        pairs = [(src, dst) for src, dsts in src_to_dists.items() for dst in dsts]
        mapping = torch.tensor(pairs, dtype=torch.int64, device=kv_caches[0].device).view(-1, 2)
        tritonattn.copy_blocks([half for cache in kv_caches for half in cache], mapping)

    @staticmethod
    def swap_blocks(
        src_kv_cache: torch.Tensor, dst_kv_cache: torch.Tensor, src_to_dst: Mapping[int, int]
    ) -> None:
        """Blocks of one cache to another's, such as from the GPU to the CPU or back."""
        mapping = torch.tensor(list(src_to_dst.items()), dtype=torch.int64).view(-1, 2)
        for source, destination in zip(src_kv_cache, dst_kv_cache, strict=True):
            tritonattn.swap_blocks(source, destination, mapping.to(source.device))


def as_stored(cache: torch.Tensor, kv_cache_dtype: str) -> torch.Tensor:
    """The old caches keep float8 as uint8, and say which in ``kv_cache_dtype``."""
    return cache if kv_cache_dtype == "auto" else cache.view(FP8[kv_cache_dtype])


def scales(kv_scale: float | torch.Tensor) -> dict[str, float | torch.Tensor]:
    """One scale served keys and values alike; 1.0 is none, so that 16 bits stay what they are."""
    unit = isinstance(kv_scale, float) and kv_scale == 1.0
    return {} if unit else {"k_scale": kv_scale, "v_scale": kv_scale}


class Attention:
    """``query [num_tokens, Hq * D]`` and the cache to ``[num_tokens, Hq * D]``.

    The old layer's arguments: ``scale`` may be any, ``head_size`` too, ``alibi_slopes`` are those
    of this rank's heads, ``sliding_window`` counts a token itself.  ``one_call`` runs prompts and
    decodes together.  ``options`` are tritonattn's (softcap, sinks, chunk_size, ...); all of them
    work with one another, for prompts, prefixes and decodes.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Sequence[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        *,
        one_call: bool = False,
        device: torch.device | str = "cpu",
        **options: Any,
    ):
        self.num_heads, self.head_size = num_heads, head_size
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.one_call = kv_cache_dtype, one_call
        if alibi_slopes is not None:
            options["alibi_slopes"] = torch.tensor(alibi_slopes, device=device)
        if sliding_window is not None:
            options["window_size"] = (sliding_window - 1, 0)
        self.options = {"softmax_scale": scale, **options}

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        metadata: AttentionMetadata,
        kv_scale: float | torch.Tensor = 1.0,
    ) -> torch.Tensor:
        query = query.view(-1, self.num_heads, self.head_size)
        key, value = (x.view(-1, self.num_kv_heads, self.head_size) for x in (key, value))
        output = torch.empty_like(query)
        prompts, lens = metadata.num_prefills, metadata.seq_lens_tensor
        starts, tables = metadata.subquery_start_loc, metadata.block_tables
        first = metadata.num_prefill_tokens
        last = first + metadata.num_decode_tokens
        if kv_cache is not None:
            halves = PagedAttention.split_kv_cache(kv_cache, self.num_kv_heads, self.head_size)
            PagedAttention.write_to_paged_cache(
                key, value, *halves, metadata.slot_mapping, self.kv_cache_dtype, kv_scale
            )
            pages = [as_stored(half, self.kv_cache_dtype) for half in halves]
        options = {**self.options, "max_seqlen_k": metadata.max_seq_len}
        cached = options | scales(kv_scale)

        if self.one_call and kv_cache is not None:  # rows of padding are the kernel's to zero
            paged_attention(
                query, *pages, tables, lens, cu_seqlens_q=starts, out=output, **cached,
                max_seqlen_q=max(metadata.max_query_len, 1),
            )  # fmt: skip
            return output.flatten(1)
        if prompts:
            rows = (query[:first], key[:first], value[:first])
            starts, bounds = starts[: prompts + 1], {"max_seqlen_q": metadata.max_query_len}
            if kv_cache is None or metadata.context_lens_tensor is None:
                varlen_attention(
                    *rows, starts, metadata.seq_start_loc, out=output[:first], **bounds, **options
                )
            else:
                context = metadata.context_lens_tensor[:prompts]
                prefix_attention(
                    *rows, *pages, tables[:prompts], starts, context, out=output[:first], **bounds,
                    **cached,
                )  # fmt: skip
        if last > first:
            paged_attention(
                query[first:last], *pages, tables[prompts:], lens[prompts:],
                out=output[first:last], **cached,
            )  # fmt: skip
        output[last:].zero_()
        return output.flatten(1)
