"""What is measured: one attention call with the work it cannot avoid.  Nothing here has tensors."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

FP8 = torch.float8_e4m3fn
RATES = {"TFLOP/s": 1e6, "TB/s": 1e6}  # operations or bytes a microsecond in one of each


@dataclass(frozen=True)
class Case:
    """``k_lens``: keys of each sequence for ``varlen_attention``, cached ones for the other two.

    Lengths are in tokens; ``q_lens=None`` is one query a sequence.
    """

    group: str
    title: str
    function: str
    k_lens: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    heads: tuple[int, int] = (32, 8)  # Hq, Hkv
    head_dims: tuple[int, int] = (128, 128)  # D, Dv
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None  # None: dtype
    page_size: int = 16
    causal: bool = True
    window: int | None = None  # tokens that a query sees, its own included
    chunk: int | None = None
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    query_scale: bool = False
    lse: bool = False
    batch_invariant: bool = False
    latent: bool = False  # the values are the first Dv dims of the keys, in the same memory
    plain: str = ""  # name of the same case without the option that this one is about

    @property
    def name(self) -> str:
        return f"{self.group} {self.title}"

    @property
    def batch(self) -> int:
        return len(self.k_lens)

    @property
    def queries(self) -> tuple[int, ...]:
        return (1,) * self.batch if self.q_lens is None else self.q_lens

    @property
    def total_q(self) -> int:
        return sum(self.queries)

    @property
    def keys(self) -> tuple[int, ...]:
        """All keys of each sequence, cached and new ones together."""
        if self.function == "prefix_attention":
            return tuple(map(sum, zip(self.k_lens, self.queries, strict=True)))
        return self.k_lens

    @property
    def is_cached(self) -> bool:
        return self.function != "varlen_attention"

    @property
    def is_decode(self) -> bool:
        return self.function == "paged_attention" and self.q_lens is None

    @property
    def is_equal(self) -> bool:
        """Whether all sequences have the same lengths."""
        return len(set(self.queries)) == len(set(self.keys)) == 1

    @property
    def features(self) -> frozenset[str]:
        """What a peer must be able to do, beyond causal attention over packed sequences."""
        has = {
            "not causal": not self.causal,
            "window": self.window is not None,
            "chunk": self.chunk is not None,
            "softcap": self.softcap > 0,
            "ALiBi": self.alibi,
            "sinks": self.sinks,
            "query_scale": self.query_scale,
            "lse": self.lse,
            "batch-invariant": self.batch_invariant,
            "fp8 cache": self.cache_dtype is not None,
            "values of another size": self.head_dims[0] != self.head_dims[1],
            "cached keys": self.is_cached,
        }
        return frozenset(name for name, is_there in has.items() if is_there)

    @property
    def unit(self) -> str:
        """What the case is judged by: "TFLOP/s", or "TB/s" where it reads a cache."""
        return "TB/s" if self.function == "paged_attention" else "TFLOP/s"

    def rate(self, microseconds: float) -> float:
        """The speed in ``unit``."""
        work = self.flops if self.unit == "TFLOP/s" else self.bytes
        return work / microseconds / RATES[self.unit]

    @cached_property
    def pairs(self) -> int:
        """Visible query-key pairs of one head, over all sequences."""
        return sum(count for count, _ in self._visible.values())

    @property
    def flops(self) -> int:
        """Floating-point operations of both matrix products on visible pairs."""
        return 2 * self.pairs * self.heads[0] * sum(self.head_dims)

    @property
    def bytes(self) -> int:
        """The least that must move: q, out, lse, and each key and value that some query sees once.

        Block tables and lengths are left out.
        """
        (heads, kv_heads), (dim, dim_v) = self.heads, self.head_dims
        size = self.dtype.itemsize
        total = self.total_q * heads * ((dim + dim_v) * size + 4 * self.lse)
        row = kv_heads * (dim if self.latent else dim + dim_v)
        for b, (_, seen) in self._visible.items():
            new = min(seen, self.queries[b]) if self.function == "prefix_attention" else 0
            cached = (self.cache_dtype or self.dtype) if self.is_cached else self.dtype
            total += row * (new * size + (seen - new) * cached.itemsize)
        return total

    @cached_property
    def _visible(self) -> dict[int, tuple[int, int]]:
        """Of each sequence: visible pairs, and keys that some query sees."""
        known: dict[tuple[int, int], tuple[int, int]] = {}
        result = {}
        for b, lengths in enumerate(zip(self.queries, self.keys, strict=True)):
            if lengths not in known:
                known[lengths] = self._count(*lengths)
            result[b] = known[lengths]
        return result

    def _count(self, lq: int, lk: int) -> tuple[int, int]:
        pos = np.arange(lk - lq, lk)
        low, high = np.zeros(lq, np.int64), np.full(lq, lk - 1)
        if self.causal:
            high = np.minimum(high, pos)
        if self.window is not None:
            low = np.maximum(low, pos - self.window + 1)
        if self.chunk is not None:
            low = np.maximum(low, pos // self.chunk * self.chunk)
            high = np.minimum(high, pos // self.chunk * self.chunk + self.chunk - 1)
        sees = high >= low
        edges = np.zeros(lk + 1, np.int64)
        np.add.at(edges, low[sees], 1)
        np.add.at(edges, high[sees] + 1, -1)
        return int((high - low + 1)[sees].sum()), int((edges.cumsum() > 0).sum())


def tiny(case: Case) -> Case:
    """A version with the same options, dtypes and head dims that the interpreter can run."""
    keep = sorted({0, 1 % case.batch, case.batch - 1})
    kv_heads = min(2, case.heads[1])
    spread = 0 if case.is_equal else 7
    k_most, q_most = (40, 12) if case.is_cached else (40, 40)

    def cut(lengths: Sequence[int], most: int) -> tuple[int, ...]:
        return tuple(min(lengths[b], most + spread * i) for i, b in enumerate(keep))

    return replace(
        case,
        k_lens=cut(case.k_lens, k_most),
        q_lens=None if case.q_lens is None else cut(case.q_lens, q_most),
        heads=(kv_heads * case.heads[0] // case.heads[1], kv_heads),
        page_size=min(case.page_size, 32),
        window=None if case.window is None else min(case.window, 16),
        chunk=None if case.chunk is None else min(case.chunk, 16),
    )


def lognormal(n: int, total: int) -> tuple[int, ...]:
    """``n`` lengths that sum to ``total``, log-normal with sigma 1, the same ones always."""
    drawn = torch.exp(torch.randn(n, generator=torch.Generator().manual_seed(0)))
    lengths = (drawn / drawn.sum() * total).long().clamp(min=1)
    lengths[0] += total - int(lengths.sum())
    return tuple(lengths.tolist())


def select(cases: Sequence[Case], patterns: Sequence[str]) -> list[Case]:
    """The cases that some pattern names, in their own order; ValueError for one that names none.

    A pattern is a name or title, a group, a glob (``*``, ``?``) for one of these, or a part of a
    name.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        found = [case.name for case in cases if case.name in _named(cases, pattern)]
        if not found:
            groups = ", ".join(dict.fromkeys(case.group for case in cases))
            raise ValueError(
                f"no case is called {pattern!r}: give a name, a part of one, or a group "
                f"({groups}); --list shows all"
            )
        chosen.update(found)
    return [case for case in cases if case.name in chosen]


def _named(cases: Sequence[Case], pattern: str) -> set[str]:
    wanted = _plain_text(pattern)
    tests = (
        lambda case: wanted in (_plain_text(case.name), _plain_text(case.title)),
        lambda case: wanted == case.group,
        lambda case: any(
            fnmatch.fnmatchcase(_plain_text(text), wanted)
            for text in (case.name, case.title, case.group)
        ),
        lambda case: wanted in _plain_text(case.name),
    )
    for test in tests:
        found = {case.name for case in cases if test(case)}
        if found:
            return found
    return set()


def _plain_text(text: str) -> str:
    return " ".join(text.replace("\N{MULTIPLICATION SIGN}", "x").casefold().split())
