"""What the tuner measures: a model's layer in a situation of serving, as a call without tensors."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, NamedTuple

import torch

from ..problem import FP8_FORMATS, MaskSpec, Problem
from .keys import DTYPES, Key, family_of, key_of, log2
from .models import Layer


class Shape(NamedTuple):
    """``batch`` sequences of ``q`` queries on ``k`` keys, the queries' own included.

    With ``chunk`` there is one more, of so many queries.
    """

    batch: int
    q: int
    k: int
    chunk: int = 0

    def __str__(self) -> str:
        more = f" + {self.chunk}" if self.chunk else ""
        return f"{self.batch} x {self.q}{more} on {self.k}"


# From what keeps few programs busy to what fills any GPU.
SHAPES: dict[str, tuple[Shape, ...]] = {
    "decode": (
        Shape(32, 1, 4096), Shape(1, 1, 8192), Shape(128, 1, 4096), Shape(32, 1, 8192),
        Shape(64, 1, 65_536), Shape(8, 1, 32_768), Shape(1, 1, 131_072), Shape(64, 1, 1024),
        Shape(8, 1, 2048), Shape(32, 1, 16_384),
    ),
    "prefill": (
        Shape(4, 4096, 4096), Shape(16, 1024, 1024), Shape(32, 512, 512), Shape(1, 16_384, 16_384),
        Shape(1, 1024, 1024), Shape(64, 128, 128),
    ),
    "prefix": (
        Shape(8, 512, 8192), Shape(1, 2048, 32_768), Shape(16, 128, 4096), Shape(1, 512, 2048),
    ),
    "paged": (
        Shape(16, 4, 8192), Shape(1, 2048, 16_384), Shape(1, 1024, 4096), Shape(128, 8, 4096),
        Shape(4, 512, 8192), Shape(1, 8, 8192),
    ),
}  # fmt: skip
FUNCTION_OF = {
    "prefill": "varlen_attention", "prefix": "prefix_attention",
    "decode": "paged_attention", "paged": "paged_attention",
}  # fmt: skip


class Steps(NamedTuple):
    layer: float
    shape: float
    variant: float


# Compiling takes most of the time, and the shapes of a layer share binaries: another one is cheap.
STEPS = Steps(1.5, 0.3, 4.0)


@dataclass(frozen=True)
class Task:
    layer: Layer
    family: str
    shape: Shape
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None  # None: dtype
    page_size: int = 16
    causal: bool = True
    batch_invariant: bool = False
    is_mixed: bool = False  # no two sequences are equally long, the longest as ``shape`` says

    def __str__(self) -> str:
        stored = self.cache_dtype or self.dtype
        more = [
            DTYPES[self.dtype] if self.dtype != torch.bfloat16 else "",
            FP8_FORMATS.get(stored, "") if self.family != "prefill" else "",
            f"pages of {self.page_size}"
            if self.family != "prefill" and self.page_size != 16
            else "",
            "batch-invariant" if self.batch_invariant else "",
        ]
        return ", ".join(
            [self.family, self.layer.title, *filter(None, more), str(self.shape)]
        )  # fmt: skip

    @property
    def function(self) -> str:
        return FUNCTION_OF[self.family]

    @property
    def situations(self) -> tuple[Task, ...]:
        """Calls of the same bucket and the same tensors, but for their lengths.

        Servers seldom see equal lengths, and what is best for them may be bad for others.
        """
        has_many = self.shape.batch > 1 and not self.shape.chunk
        return (self, replace(self, is_mixed=True)) if has_many else (self,)

    @property
    def q_lens(self) -> tuple[int, ...]:
        batch, q, k, chunk = self.shape
        if not self.is_mixed or self.family != "prefill" or q < k:
            return (q,) * batch + ((chunk,) if chunk else ())
        left, lengths = batch * q, list[int]()  # as many tokens in all
        for length in itertools.cycle(spread(8, q)):
            lengths.append(min(length, left))
            left -= lengths[-1]
            if not left:
                return tuple(lengths)
        raise AssertionError("a cycle ends")

    @property
    def k_lens(self) -> tuple[int, ...]:
        """Keys of each sequence, the new ones included."""
        q_lens, most = self.q_lens, self.shape.k
        if not self.is_mixed:
            return tuple(max(most, q) for q in q_lens)
        if self.family == "prefill" and self.shape.q == most:
            return q_lens
        return tuple(map(max, spread(len(q_lens), most), q_lens))

    @property
    def cached_lens(self) -> tuple[int, ...]:
        if self.family == "prefix":
            return tuple(k - q for k, q in zip(self.k_lens, self.q_lens, strict=True))
        return self.k_lens

    @property
    def table_width(self) -> int:
        """Columns of the block table."""
        return -(-max(self.cached_lens) // self.page_size)

    @property
    def max_seqlens(self) -> dict[str, int]:
        return {"max_seqlen_q": max(self.q_lens), "max_seqlen_k": max(self.k_lens)}

    @property
    def problem(self) -> Problem:
        """What ``validate`` makes of the call."""
        layer, is_decode = self.layer, self.family == "decode"
        total_q = sum(self.q_lens)
        max_q = 1 if is_decode else min(1 << log2(max(self.q_lens)), total_q)
        cached = self.table_width * self.page_size
        # The most keys that a sequence's buffers can hold.
        capacity = {"prefill": sum(self.k_lens), "prefix": total_q + cached}
        most_k = capacity.get(self.family, cached)
        known_k = max_q + cached if self.family == "prefix" else most_k
        has_cache = self.family != "prefill"
        return Problem(
            function=self.function,
            dtype=self.dtype,
            out_dtype=self.dtype,
            head_dim=layer.head_dim,
            head_dim_v=layer.value_dim,
            num_kv_heads=layer.num_kv_heads,
            group=layer.num_heads // layer.num_kv_heads,
            mask=MaskSpec(
                causal=self.causal,
                has_left=bool(layer.window),
                has_right=self.causal or bool(layer.window),
                has_chunk=bool(layer.chunk),
            ),
            cache_dtype=(self.cache_dtype or self.dtype) if has_cache else None,
            page_size=self.page_size if has_cache else 0,
            has_softcap=layer.softcap > 0,
            has_alibi=layer.alibi,
            has_sinks=layer.sinks,
            has_query_scale=layer.query_scale,
            is_decode=is_decode,
            is_latent=layer.latent and self.function == "paged_attention",
            batch_invariant=self.batch_invariant,
            batch=len(self.q_lens),
            total_q=total_q,
            max_q=max_q,
            capacity_k=most_k,
            max_k=min(1 << log2(max(self.k_lens)), known_k),
        )

    @property
    def key(self) -> Key:
        return key_of(self.problem)

    @property
    def scalars(self) -> dict[str, Any]:
        """The call's options that are no tensors."""
        layer = self.layer
        given = {
            "causal": None if self.causal else False,
            "window_size": (layer.window - 1, 0) if layer.window else None,
            "chunk_size": layer.chunk or None,
            "softcap": layer.softcap or None,
            "batch_invariant": self.batch_invariant or None,
        }
        return {name: value for name, value in given.items() if value is not None}


def spread(count: int, most: int) -> tuple[int, ...]:
    """``count`` log-normal lengths (sigma 1), the longest ``most`` and first, the same ones always.

    Quantiles, not draws, so that few lengths are typical too.
    """
    normal = NormalDist()
    scales = [math.exp(normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
    others = [max(1, round(most * scale / scales[-1])) for scale in scales[:-1]]
    random.Random(0).shuffle(others)
    return (most, *others)


def tasks(
    layers: Iterable[Layer],
    families: Sequence[str] = tuple(SHAPES),
    shapes: Sequence[Shape] = (),
    variants: Sequence[Mapping[str, Any]] = ({},),
    **how: Any,
) -> list[Task]:
    """One task for each bucket, the most valuable first: those of the first layers, shapes and
    variants, a step in any of which weighs as STEPS say.

    ``shapes`` take the place of the usual ones, each in the families that it can be.  ``how`` goes
    to every Task, and so does each of ``variants``.
    """
    ranked: list[tuple[float, Task]] = []
    for (j, variant), (n, layer) in itertools.product(enumerate(variants), enumerate(layers)):
        for family in families:
            if FUNCTION_OF[family] not in layer.functions:
                continue
            mine = [s for s in shapes if _suits(s, family)] if shapes else SHAPES[family]
            for i, shape in enumerate(mine):
                task = Task(layer, family, shape, **{**how, **variant})
                ranked.append((STEPS.layer * n + STEPS.shape * i + STEPS.variant * j, task))
    ranked.sort(key=lambda pair: pair[0])
    unique: dict[Key, Task] = {}
    for _, task in ranked:
        unique.setdefault(task.key, task)
    return list(unique.values())


def _suits(shape: Shape, family: str) -> bool:
    if family == "decode":
        return shape.q == 1 and not shape.chunk
    if family == "paged":
        return shape.q > 1 or shape.chunk > 1
    return shape.q <= shape.k and not shape.chunk


def describe(problem: Problem) -> str:
    """A Problem on one line."""
    mask, group = problem.mask, problem.group
    flags = [
        "causal" if mask.causal else "not causal",
        *("window" for _ in range(mask.has_left or (mask.has_right and not mask.causal))),
        *("chunks" for _ in range(mask.has_chunk)),
        *("tree" for _ in range(mask.has_tree)),
        *(
            name
            for name in ("softcap", "alibi", "sinks", "query_scale")
            if getattr(problem, f"has_{name}")
        ),
        *("batch-invariant" for _ in range(problem.batch_invariant)),
    ]
    dims = f"{problem.head_dim}"
    if problem.head_dim_v != problem.head_dim:
        dims += f"/{problem.head_dim_v}"
    heads = "latent heads" if problem.is_latent else "heads"
    stored = problem.cache_format or DTYPES[problem.dtype]
    cache = f"{stored} cache in pages of {problem.page_size}, "
    return (
        f"{family_of(problem)}: {DTYPES[problem.dtype]}, {problem.num_kv_heads * group}/"
        f"{problem.num_kv_heads} {heads} of {dims}, {cache if problem.has_cache else ''}"
        f"{', '.join(flags)}; {problem.batch} sequences, {problem.total_q} queries in all, at most "
        f"{problem.max_q} queries and {problem.max_k} keys each"
    )
