"""What tests of flash-attn's functions share: combinations of arguments, batches, comparisons."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonattn import reference
from tritonattn.testing import assert_close, cumulative, generator, normal

fp16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def pairs(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows of values in which each two values of two axes meet at least once."""
    names, sizes = list(axes), [len(values) for values in axes.values()]
    wanted = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(range(len(names)), 2)
        for x, y in itertools.product(range(sizes[a]), range(sizes[b]))
    }
    rows = []
    while wanted:
        row = dict(min(wanted))
        for i in range(len(names)):
            if i not in row:  # the value that meets most of what has not met yet
                met = [
                    sum(tuple(sorted([(i, x), at])) in wanted for at in row.items())
                    for x in range(sizes[i])
                ]
                row[i] = met.index(max(met))
        wanted -= set(itertools.combinations(sorted(row.items()), 2))
        rows.append({names[i]: axes[names[i]][x] for i, x in row.items()})
    return rows


def compare(
    result: Any,
    q: Tensor,
    oracle: tuple[Tensor, Tensor],
    fair: tuple[Tensor, Tensor],
    factor: float,
    note: str = "",
) -> None:
    """``(out, lse)`` or ``out`` within the error budget; all packed, ``lse`` with heads first."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    assert_close(out, oracle[0], fair[0], dtype=q.dtype, factor=factor, note=note)
    if lse is not None:
        budget: dict[str, Any] = {"dtype": torch.float32, "factor": factor, "name": "lse"}
        assert_close(lse, oracle[1], fair[1], note=note, **budget)


class Batch:
    """Packed tensors of sequences, and what attention over them must give."""

    def __init__(self, q_lens, k_lens, heads, dims, dtype, device, seed=0, **options):
        how: dict[str, Any] = {"generator": generator(seed), "dtype": dtype, "device": device}
        (hq, hkv), (dim, dim_v) = heads, dims
        self.q = normal(sum(q_lens), hq, dim, **how)
        self.k = normal(sum(k_lens), hkv, dim, **how)
        self.v = normal(sum(k_lens), hkv, dim_v, **how)
        self.q_lens, self.k_lens, self.device = q_lens, k_lens, device
        self.options = options
        self.factor = 3.0 if options.get("softcap") else 2.0

    def check(self, result: Any) -> None:
        sums = cumulative(self.q_lens, self.device), cumulative(self.k_lens, self.device)
        oracle, fair = (
            reference.varlen_attention(
                self.q, self.k, self.v, *sums, **self.options, return_lse=True, compute_dtype=t
            )
            for t in (f64, self.q.dtype)
        )
        compare(result, self.q, oracle, fair, self.factor)


def slopes(heads: int, batch: int, rank: int, device: torch.device) -> Tensor | None:
    if rank == 0:
        return None
    values = 2.0 ** -torch.arange(1, batch * heads + 1, device=device).view(batch, heads)
    return values if rank == 2 else values[0]


# The axes of flash-attn's own tests of these functions.
PATTERNS = pairs(
    {
        "lengths": ((1, 1), (3, 9), (9, 3), (5, 5), (1, 12)),
        "masked": ("", "causal", "local"),
        "alibi": (0, 1, 2),
        "softcap": (0.0, 5.0),
        "heads": ((2, 2), (4, 2), (3, 1)),
        "dims": ((16, 16), (40, 24), (59, 59)),
        "dtype": (fp16, bf16, f32),
        "deterministic": (False, True),
    }
)


def options_of(row: dict[str, Any], batch: int, device: torch.device) -> dict[str, Any]:
    return {
        "causal": row["masked"] == "causal",
        "window_size": (3, 1) if row["masked"] == "local" else (-1, -1),
        "softcap": row["softcap"],
        "alibi_slopes": slopes(row["heads"][0], batch, row["alibi"], device),
    }


EXTRAS: list[dict[str, Any]] = [
    {"s_aux": True}, {"sinks": True}, {"attention_chunk": 3}, {"num_splits": 2},
    {"softmax_scale": 0.3},
]  # fmt: skip


def extras_of(extra: dict[str, Any], device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments, and the oracle's options."""
    given = dict(extra)
    for name in {"s_aux", "sinks"} & set(given):
        given[name] = normal(2, dtype=f32, generator=generator(3), device=device)
    names = {"s_aux": "sinks", "attention_chunk": "chunk_size"}
    return given, {names.get(n, n): x for n, x in given.items()}
