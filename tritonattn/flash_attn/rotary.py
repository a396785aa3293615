"""Rotary position embedding of queries and new keys, as ``flash_attn_with_kvcache`` applies it.

``(a, b) -> (a cos - b sin, a sin + b cos)`` for each pair of dims among a head's first ``2 R``,
where cos and sin have R columns: dims ``(2i, 2i + 1)`` interleaved, else ``(i, i + R)`` (GPT-NeoX).
Computed in float32 and rounded once.  Source: RoFormer (Su et al. 2021).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """``cos`` and ``sin`` ``[rows, R]``; ``start [B]``: the position of the first new token."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    start: Tensor


def rotate(x: Tensor, rotary: Rotary, positions: Tensor) -> Tensor:
    """``x [n, heads, D]`` at ``positions [n]``.

    A position that has no row, as that of a padded sequence, takes the nearest one.
    """
    rows = positions.clamp(0, rotary.cos.shape[0] - 1)
    cos, sin = (part[rows].float().unsqueeze(-2) for part in (rotary.cos, rotary.sin))  # [n, 1, R]
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if rotary.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        pairs = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
    return torch.cat([pairs.to(x.dtype), rest], dim=-1)


def positions(
    first: Tensor, starts: Tensor | None, length: int, count: int, advance: bool
) -> Tensor:
    """Of ``count`` packed tokens ``[n]``: ``first[b] + t`` for the t-th of sequence b.

    Each sequence has ``length`` tokens, or those that ``starts`` says.  Without ``advance`` all of
    a sequence's tokens are at ``first[b]``.
    """
    if starts is None:
        place = first[:, None].expand(-1, length)
        if advance:
            place = place + torch.arange(length, dtype=first.dtype, device=first.device)
        return place.flatten()
    token = torch.arange(count, dtype=starts.dtype, device=starts.device)
    sequence = (torch.searchsorted(starts, token, right=True) - 1).clamp(0, first.shape[0] - 1)
    place = first[sequence]
    return place + token - starts[sequence] if advance else place
