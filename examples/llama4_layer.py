"""Llama 4's attention in plain torch around tritonattn, for one rank of a tensor-parallel model.

Layers with rotary embedding attend within chunks (``chunk_size=``) and norm their queries and keys;
layers without attend to everything, at a temperature that grows with the position
(``query_scale=``).  The same code serves prompts, chunks of prompts, decodes and mixtures through a
paged cache.  Nothing is read on the host, no sequence is cut into virtual ones, and a chunk may be
of any size.  ``llama4_attention.py`` beside this file shows that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tritonattn import (
    attention_temperature,
    paged_attention,
    prefix_attention,
    varlen_attention,
    write_kv_cache,
)


@dataclass(frozen=True)
class Config:
    """Llama 4's own names; the sizes are small ones."""

    hidden_size: int = 64
    num_attention_heads: int = 10
    num_key_value_heads: int = 2
    head_dim: int = 16
    attention_chunk_size: int = 7
    rope_theta: float = 500000.0
    rope_interleaved: bool = True  # pairs of neighbours; False: the halves of a head ("neox")
    use_qk_norm: bool = True
    rms_norm_eps: float = 1e-5
    attn_temperature_tuning: bool = True
    floor_scale: float = 8192.0
    attn_scale: float = 0.1


@dataclass(frozen=True)
class Batch:
    """Where the new tokens of B sequences stand and where their keys lie; all but stage on the GPU.

    stage: "prefill" (nothing cached), "chunk" (more of prompts), "decode" (a token each), "mixed".
    """

    stage: str
    positions: torch.Tensor  # [tokens] int32
    slot_mapping: torch.Tensor  # [tokens] int64
    block_table: torch.Tensor  # [B, max_pages] int32
    cu_seqlens: torch.Tensor  # [B + 1] int32, prefix sums of the new tokens
    context_lens: torch.Tensor  # [B] int32, tokens cached before
    seq_lens: torch.Tensor  # [B] int32, cached and new ones


class Llama4Attention:
    """One layer's share of rank ``rank`` of ``world``; the ranks' results sum to the layer's.

    ``weights`` are the whole layer's: q ``[Hq * D, hidden]``, k and v ``[Hkv * D, hidden]``, o
    ``[hidden, Hq * D]``.  A rank has ``Hq / world`` query heads.  Where there are fewer KV heads
    than ranks, neighbours share a copy of one.
    """

    def __init__(
        self,
        config: Config,
        use_rope: bool,
        weights: Mapping[str, torch.Tensor],
        rank: int = 0,
        world: int = 1,
    ):
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        if heads % world or (kv_heads % world and world % kv_heads):
            raise ValueError(f"{heads} heads on {kv_heads} do not divide among {world} ranks")
        self.config, self.use_rope = config, use_rope
        mine = heads // world
        copies = max(1, world // kv_heads)
        first, mine_kv = rank // copies, max(1, kv_heads // world)

        def rows(weight: torch.Tensor, start: int, count: int) -> torch.Tensor:
            return weight[start * config.head_dim : (start + count) * config.head_dim]

        self.q = rows(weights["q"], rank * mine, mine)
        self.k, self.v = (rows(weights[name], first * mine_kv, mine_kv) for name in "kv")
        self.o = rows(weights["o"].T, rank * mine, mine).T

    def new_cache(self, num_pages: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages of this rank's KV heads, of NaN: what is not written is never used."""
        config = self.config
        shape = (2, num_pages, page_size, len(self.k) // config.head_dim, config.head_dim)
        k_cache, v_cache = self.k.new_full(shape, torch.nan).unbind(0)
        return k_cache, v_cache

    def forward(
        self, hidden: torch.Tensor, batch: Batch, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """``hidden [tokens, hidden_size]`` to this rank's part of the same."""
        config = self.config
        q, k, v = (
            F.linear(hidden, weight).unflatten(-1, (-1, config.head_dim))
            for weight in (self.q, self.k, self.v)
        )
        options: dict[str, Any] = {}
        if self.use_rope:
            options["chunk_size"] = config.attention_chunk_size
            q, k = rotate(q, batch.positions, config), rotate(k, batch.positions, config)
            if config.use_qk_norm:
                q, k = rms_norm(q, config.rms_norm_eps), rms_norm(k, config.rms_norm_eps)
        elif config.attn_temperature_tuning:  # on float32 logits: q itself is not rounded again
            options["query_scale"] = attention_temperature(
                batch.positions, floor_scale=config.floor_scale, attn_scale=config.attn_scale
            )
        write_kv_cache(k, v, k_cache, v_cache, batch.slot_mapping)
        pages, starts = (k_cache, v_cache, batch.block_table), batch.cu_seqlens
        if batch.stage == "prefill":
            out = varlen_attention(q, k, v, starts, starts, **options)
        elif batch.stage == "chunk":
            out = prefix_attention(q, k, v, *pages, starts, batch.context_lens, **options)
        elif batch.stage == "decode":
            out = paged_attention(q, *pages, batch.seq_lens, **options)
        else:
            out = paged_attention(q, *pages, batch.seq_lens, cu_seqlens_q=starts, **options)
        return F.linear(out.flatten(1), self.o)


def rotate(x: torch.Tensor, positions: torch.Tensor, config: Config) -> torch.Tensor:
    """Rotary position embedding of ``[tokens, heads, D]``, in float32."""
    pair = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=x.device)
    angle = positions[:, None] * config.rope_theta ** (-pair / config.head_dim)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]  # [tokens, 1, D / 2]
    if config.rope_interleaved:
        first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = x.float().chunk(2, dim=-1)
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
    turned = turned if config.rope_interleaved else turned.transpose(-1, -2)
    return turned.flatten(-2).to(x.dtype)


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Each head divided by its root mean square, without a weight."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
