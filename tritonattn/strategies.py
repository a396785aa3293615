"""Hypothesis strategies that draw whole calls, valid ones only, of the three attention functions.

    >>> from hypothesis import given
    >>> from tritonattn.strategies import paged_cases
    >>> from tritonattn.testing import check
    >>> @given(paged_cases(options={"window_size", "sinks", "poison"}))
    ... def test_paged_attention_equals_the_oracle(case):
    ...     check(case)

Lengths, orders and strides are drawn widely; what makes another kernel (dtypes, head sizes, ratios
of heads) comes from short lists.  An example shrinks towards one short sequence without options.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from .call import Call
from .testing import PACKED_LAYOUTS, POOL_LAYOUTS, SCALE_SHAPES, Case

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "tritonattn.strategies draws its cases with hypothesis, which is not installed; "
        'pip install "tritonattn[test]" brings it.'
    ) from error

__all__ = ["OPTIONS", "Case", "paged_cases", "prefix_cases", "varlen_cases"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
HEADS = ((1, 1), (2, 2), (3, 1), (5, 1), (14, 2), (8, 2), (71, 1))
HEAD_DIMS = ((16, 16), (32, 32), (64, 64), (24, 24), (80, 80), (48, 32), (96, 112), (128, 128))
PAGE_SIZES = range(1, 33)

# What may be drawn.  A name left out of a strategy's ``options`` keeps its default.
OPTIONS = frozenset(
    {
        # arguments of the call
        "softmax_scale", "causal", "window_size", "chunk_size", "softcap", "alibi_slopes", "sinks",
        "query_scale", "tree_mask", "kv_scale", "return_lse", "out", "num_splits",
        "batch_invariant", "max_seqlens", "block_indptr",
        # what the tensors are like
        "fp8", "int64_table", "layout", "padding_rows", "negative_lengths",
        # the test's own
        "poison", "probe",
    }
)  # fmt: skip


def varlen_cases(
    *,
    max_len: int = 70,
    max_batch: int = 3,
    dtypes: Sequence[torch.dtype] = DTYPES,
    heads: Sequence[tuple[int, int]] = HEADS,
    head_dims: Sequence[tuple[int, int]] = HEAD_DIMS,
    options: Collection[str] = OPTIONS,
) -> st.SearchStrategy[Case]:
    """Calls of ``varlen_attention`` with lengths up to ``max_len``."""
    limits = (max_len, max_batch, dtypes, heads, head_dims)
    return _cases("varlen_attention", *limits, (16,), _known(options))


def prefix_cases(
    *,
    max_len: int = 70,
    max_batch: int = 3,
    dtypes: Sequence[torch.dtype] = DTYPES,
    heads: Sequence[tuple[int, int]] = HEADS,
    head_dims: Sequence[tuple[int, int]] = HEAD_DIMS,
    page_sizes: Sequence[int] = PAGE_SIZES,
    options: Collection[str] = OPTIONS,
) -> st.SearchStrategy[Case]:
    """Calls of ``prefix_attention`` with up to ``max_len`` cached and ``max_len`` new tokens."""
    limits = (max_len, max_batch, dtypes, heads, head_dims)
    return _cases("prefix_attention", *limits, page_sizes, _known(options))


def paged_cases(
    *,
    max_len: int = 70,
    max_batch: int = 3,
    dtypes: Sequence[torch.dtype] = DTYPES,
    heads: Sequence[tuple[int, int]] = HEADS,
    head_dims: Sequence[tuple[int, int]] = HEAD_DIMS,
    page_sizes: Sequence[int] = PAGE_SIZES,
    options: Collection[str] = OPTIONS,
) -> st.SearchStrategy[Case]:
    """Calls of ``paged_attention``, plain decode and mixed batches, with up to ``max_len`` keys."""
    limits = (max_len, max_batch, dtypes, heads, head_dims)
    return _cases("paged_attention", *limits, page_sizes, _known(options))


def _known(options: Collection[str]) -> frozenset[str]:
    unknown = set(options) - OPTIONS
    if unknown:
        raise ValueError(f"options may be {sorted(OPTIONS)}; got {sorted(unknown)}")
    return frozenset(options)


@st.composite
def _cases(
    draw: st.DrawFn,
    function: str,
    max_len: int,
    max_batch: int,
    dtypes: Sequence[torch.dtype],
    heads: Sequence[tuple[int, int]],
    head_dims: Sequence[tuple[int, int]],
    page_sizes: Sequence[int],
    options: frozenset[str],
) -> Case:
    def maybe(name: str, default: Any, *values: Any) -> Any:
        """The default, or one of ``values`` (a strategy, or things to choose from)."""
        if name not in options:
            return default
        is_strategy = isinstance(values[0], st.SearchStrategy)
        others = values[0] if is_strategy else st.sampled_from(values)
        return draw(st.just(default) | others)

    has_cache = function != "varlen_attention"
    lengths = st.integers(0, min(3, max_len)) | st.integers(0, max_len)
    k_lengths = lengths
    if has_cache and "negative_lengths" in options:
        k_lengths = st.one_of(*[lengths] * 4, st.sampled_from((-1, -9)))
    batch = draw(st.sampled_from((*range(1, max_batch + 1), *range(1, max_batch + 1), 0)))
    pairs = [(draw(lengths), draw(k_lengths)) for _ in range(batch)]
    q_lens: tuple[int, ...] | None = tuple(q for q, _ in pairs)
    if function == "paged_attention" and draw(st.booleans()):
        q_lens = None

    dims = draw(st.sampled_from(head_dims))
    pool_layouts = POOL_LAYOUTS if dims[1] >= dims[0] else (*POOL_LAYOUTS, "latent")
    causal = maybe("causal", True, False)
    tree_mask = causal and maybe("tree_mask", False, True)
    sides = st.sampled_from((None, -1)) | st.integers(0, 2) | st.integers(0, max_len)
    given = {
        "softmax_scale": maybe("softmax_scale", None, 1.0, 0.3, 0.0, -0.5),
        "causal": causal,
        "window_size": maybe("window_size", None, st.tuples(sides, sides)),
        "chunk_size": maybe("chunk_size", None, st.integers(1, max_len)),
        "softcap": maybe("softcap", 0.0, 1.0, 30.0),
        "num_splits": maybe("num_splits", 0, 1, 2, 3, 8),
        "batch_invariant": maybe("batch_invariant", False, True),
        "return_lse": maybe("return_lse", False, True),
    }
    defaults = Call(function, torch.empty(0))
    table = "int32"
    if has_cache:
        table = maybe("int64_table", "int32", "int64")
        table = maybe("block_indptr", table, "flat")
    return Case(
        function,
        k_lens=tuple(k for _, k in pairs),
        q_lens=q_lens,
        heads=draw(st.sampled_from(heads)),
        head_dims=dims,
        dtype=draw(st.sampled_from(dtypes)),
        cache_dtype=maybe("fp8", None, *FP8_DTYPES) if has_cache else None,
        page_size=draw(st.sampled_from(page_sizes)),
        padding_rows=0 if q_lens is None else maybe("padding_rows", 0, st.integers(1, 3)),
        layout=maybe("layout", *PACKED_LAYOUTS),
        pool_layout=maybe("layout", *pool_layouts) if has_cache else POOL_LAYOUTS[0],
        table=table,
        max_seqlens=maybe("max_seqlens", False, True),
        alibi=maybe("alibi_slopes", 0, 1, 2),
        sinks=maybe("sinks", False, True),
        option_dtype=draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float64))),
        query_scale=maybe("query_scale", False, True),
        tree_mask=tree_mask,
        kv_scale=maybe("kv_scale", "", *SCALE_SHAPES),
        out=maybe("out", "", "contiguous", "sliced", "float32", "bfloat16"),
        options={k: v for k, v in given.items() if v != getattr(defaults, k)},
        poison=maybe("poison", "", "nan", "inf"),
        probe=maybe("probe", False, False, False, True),  # seldom: it hides what is wrong with q
        seed=draw(st.integers(0, 2**16)),
    )
