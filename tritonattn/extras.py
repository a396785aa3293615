"""Small tensors that models give to attention: ALiBi's slopes, Llama 4's attention temperature."""

from __future__ import annotations

import torch

from . import rules
from .errors import bad_value


def alibi_slopes(num_heads: int, *, device: torch.device | str | None = None) -> torch.Tensor:
    """The slopes that ALiBi gives ``num_heads`` query heads, ``[num_heads]`` float32 on ``device``.

    With p the greatest power of two not above ``num_heads``: ``2^(-8 (i + 1) / p)`` for the first p
    heads, then every second slope, the first one included, of the sequence for 2p heads (Press et
    al., "Train Short, Test Long", and their code).  Under tensor parallelism pass the whole model's
    ``num_heads`` and take the slopes of the heads at hand.

    Raises ArgumentTypeError or ArgumentValueError unless ``num_heads`` is an int of at least 1.

    >>> alibi_slopes(6).log2().tolist()
    [-2.0, -4.0, -6.0, -8.0, -1.0, -3.0]
    """
    rules.integer("alibi_slopes", "num_heads", num_heads, 1)
    power = 1 << (num_heads.bit_length() - 1)
    head = torch.arange(num_heads, dtype=torch.float64, device=device)
    exponent = torch.where(head < power, -8.0 * (head + 1.0), -4.0 * (2.0 * (head - power) + 1.0))
    return torch.exp2(exponent / power).to(torch.float32)


def attention_temperature(
    positions: torch.Tensor, *, floor_scale: float = 8192.0, attn_scale: float = 0.1
) -> torch.Tensor:
    """The factor on queries' logits that grows with their positions (Llama 4), for ``query_scale``.

    positions: ``[n]`` int32 or int64, any device; the queries' positions, from 0.

    Returns ``1 + attn_scale * ln(1 + floor((positions + 1) / floor_scale))``, ``[n]`` float32 on
    the same device.

    Raises ArgumentTypeError or ArgumentValueError for positions that are not integers and for a
    ``floor_scale`` not above 0.

    >>> factors = attention_temperature(torch.tensor([0, 8190, 8191, 16383]))
    >>> [round(x, 6) for x in factors.tolist()]
    [1.0, 1.0, 1.069315, 1.109861]
    """
    f = "attention_temperature"
    rules.tensor(f, "positions", positions, "[n]")
    rules.dtype(f, "positions", positions, rules.INDEX_DTYPES, "Pass positions.long().")
    rules.rank(f, "positions", positions, 1, "[n]", "Pass positions.flatten().")
    rules.finite(f, "attn_scale", attn_scale)
    rules.finite(f, "floor_scale", floor_scale)
    if floor_scale <= 0:
        raise bad_value(f, "floor_scale", "must be above 0", floor_scale, "Llama 4 uses 8192.0.")
    # In float64, as a float32 position past 2^24 may be on the wrong side of a multiple.
    steps = torch.floor((positions.to(torch.float64) + 1.0) / floor_scale)
    return (1.0 + attn_scale * torch.log1p(steps)).to(torch.float32)
