"""What a tuned configuration is remembered under: classes and power-of-two buckets, no raw sizes.

A key is the call's static facts and three buckets: queries a sequence, keys a sequence, and rows,
which are the queries of all sequences times the query heads and so tell how well the call fills a
GPU.  In batch-invariant mode the buckets are empty, as a sequence's bits must not depend on what
else is in the batch.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from ..problem import FP8_FORMATS, Problem

FAMILIES = ("prefill", "prefix", "decode", "paged")
MASKS = ("causal", "full", "window")
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
MAX_DISTANCE = 2  # further away the rules of thumb have measured better

# Greater sizes share the last bucket: there a call fills the GPU whatever its size.
_LAST_Q, _LAST_K, _LAST_ROWS = 14, 17, 20

_TEXT = re.compile(
    rf"({'|'.join(DTYPES.values())})(?: ({'|'.join(FP8_FORMATS.values())}))?"
    rf" d(\d+)(?:/(\d+))?( latent)? group(\d+)(?: page(\d+|-any))?"
    rf" ({'|'.join(MASKS)})(\+features)?"
    r" (?:invariant|q(\d+) k(\d+) rows(\d+))",
    re.ASCII,
)


class Key(NamedTuple):
    """``str`` writes it as tables do, sizes as the buckets' upper ends; ``parse`` reads that."""

    family: str
    dtype: str
    cache: str  # the cache's float8 format, "" for the queries' own dtype or no cache
    head_dim: int
    head_dim_v: int
    latent: bool
    group: int  # query heads a KV head, up to the next power of two
    page: int  # 1, 4, 16, 64 or 256; 0: no power of two; -1: no cache
    mask: str  # "window" where rows see a part of the keys far from the diagonal: chunks too
    features: bool  # what costs arithmetic on every score: softcap, ALiBi, trees
    invariant: bool
    q: int = 0  # log2
    k: int = 0
    rows: int = 0

    def __str__(self) -> str:
        parts = [self.dtype, self.cache, f"d{self.head_dim}"]
        if self.head_dim_v != self.head_dim:
            parts[-1] += f"/{self.head_dim_v}"
        parts.append("latent" * self.latent)
        parts.append(f"group{self.group}")
        if self.page >= 0:
            parts.append(f"page{self.page}" if self.page else "page-any")
        parts.append(self.mask + "+features" * self.features)
        if self.invariant:
            parts.append("invariant")
        else:
            parts += [f"q{1 << self.q}", f"k{1 << self.k}", f"rows{1 << self.rows}"]
        return " ".join(filter(None, parts))

    @classmethod
    def parse(cls, family: str, text: str) -> Key:
        """Raises ValueError for a text that no key writes."""
        found = _TEXT.fullmatch(text)
        if found is None or family not in FAMILIES:
            raise ValueError(f"no bucket is called {text[:100]!r}")
        dtype, cache, d, dv, latent, group, page, mask, features, *sizes = found.groups()
        if any(len(n or "") > 9 for n in (d, dv, group, *sizes)):
            raise ValueError(f"no bucket is called {text[:100]!r}")
        key = cls(
            family, dtype, cache or "", int(d), int(dv or d), bool(latent), int(group),
            -1 if page is None else 0 if page == "-any" else int(page[:9]),
            mask, bool(features), sizes[0] is None,
            *(log2(int(n)) if n else 0 for n in sizes),
        )  # fmt: skip
        if str(key) != text:
            raise ValueError(f"no bucket is called {text[:100]!r}")
        return key


def key_of(problem: Problem) -> Key:
    mask = problem.mask
    reach = "causal" if mask.causal else "full"
    if mask.has_left or mask.has_chunk or (mask.has_right and not mask.causal):
        reach = "window"
    static = (
        family_of(problem), DTYPES[problem.dtype], problem.cache_format,
        problem.head_dim, problem.head_dim_v, problem.is_latent,
        1 << log2(problem.group), _page_class(problem), reach,
        problem.has_softcap or problem.has_alibi or mask.has_tree, problem.batch_invariant,
    )  # fmt: skip
    if problem.batch_invariant:
        return Key(*static)
    return Key(
        *static,
        min(log2(problem.max_q), _LAST_Q),
        min(log2(problem.max_k), _LAST_K),
        min(log2(problem.total_q * problem.num_kv_heads * problem.group), _LAST_ROWS),
    )


def family_of(problem: Problem) -> str:
    if problem.function == "varlen_attention":
        return "prefill"
    if problem.function == "prefix_attention":
        return "prefix"
    # The bound on the queries depends on the batch; how the call was made does not.
    one_each = problem.is_decode if problem.batch_invariant else problem.max_q == 1
    return "decode" if one_each else "paged"


def distance(wanted: Key, other: Key) -> int | None:
    """How far ``other`` is from what is wanted; None: it says nothing about it."""
    for name in ("family", "cache", "head_dim", "head_dim_v", "latent", "features", "invariant"):
        if getattr(wanted, name) != getattr(other, name):
            return None
    # float16 and bfloat16 take the same instructions, unless float8 is turned into them.
    dtypes = {wanted.dtype, other.dtype}
    if len(dtypes) > 1 and ("fp32" in dtypes or wanted.cache):
        return None
    group = abs(log2(wanted.group) - log2(other.group))
    q = abs(wanted.q - other.q)
    if group > 1 or q > 2:  # other tiles would be right
        return None
    page = 0
    if wanted.page != other.page:
        sizes = (wanted.page, other.page)
        page = 2 if min(sizes) < 1 else abs(log2(sizes[0]) - log2(sizes[1])) // 2
    mask = 3 * (wanted.mask != other.mask)
    far = 2 * (group + q) + abs(wanted.k - other.k) + abs(wanted.rows - other.rows) + page + mask
    return far if far <= MAX_DISTANCE else None


def log2(n: int) -> int:
    """The bucket of ``n``: log2 of the least power of two that is not under it."""
    return (n - 1).bit_length() if n > 1 else 0


def _page_class(problem: Problem) -> int:
    size = problem.page_size
    if not problem.has_cache:
        return -1
    if size & (size - 1) or size > 1024:
        return 0
    return min(256, 1 << (size.bit_length() - 1) // 2 * 2)
