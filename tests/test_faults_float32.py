"""float32 calls that hunts found just past the error budget: each is now within it."""

from __future__ import annotations

import pytest
import torch

from tritonattn import portable
from tritonattn.case import Case
from tritonattn.device import target
from tritonattn.testing import check
from tritonattn.tuning.config import blocks

COMMON = {
    "heads": (14, 2), "head_dims": (128, 128), "dtype": torch.float32, "layout": "head_major",
    "alibi": 1, "query_scale": True, "out": "sliced",
}  # fmt: skip
BESIDE_PAGES = {
    "page_size": 6, "pool_layout": "head_major", "table": "int64", "option_dtype": torch.bfloat16,
    "poison": "nan", "seed": 3,
}  # fmt: skip
CAPPED = {
    "q_lens": (1, 55), "heads": (2, 2), "head_dims": (96, 112), "dtype": torch.float32,
    "padding_rows": 2, "max_seqlens": True, "alibi": 1, "option_dtype": torch.float64,
    "query_scale": True, "poison": "nan", "seed": 8070,
    "options": {
        "softmax_scale": 1.0, "causal": False, "chunk_size": 56, "softcap": 30.0, "num_splits": 3,
    },
}  # fmt: skip
FOUND = {
    # A bias that float32 holds exactly was rounded by log2(e), and far keys' biases are large.
    "bias alone": Case(
        "varlen_attention", (2, 3), (37, 1), padding_rows=2, option_dtype=torch.float64,
        tree_mask=True, kv_scale="float", seed=10486,
        options={"softmax_scale": 0.0, "num_splits": 1, "batch_invariant": True}, **COMMON,
    ),
    "bias and scores": Case(
        "prefix_attention", (3,), (5,), max_seqlens=True, **COMMON, **BESIDE_PAGES,
        options={
            "softmax_scale": 0.3, "causal": False, "chunk_size": 52, "batch_invariant": True,
            "return_lse": True,
        },
    ),
    "bias and scores, not invariant": Case(
        "prefix_attention", (3,), (5,), **COMMON, **BESIDE_PAGES,
        options={"softmax_scale": 0.3, "causal": False, "chunk_size": 52, "return_lse": True},
    ),
    # Sums of 96 to 128 products, one after the other, rounded more than PyTorch's.
    "many bits of a scale": Case(
        "varlen_attention", (1, 2), (0, 20), heads=(3, 1), head_dims=(128, 128),
        dtype=torch.float32, padding_rows=1, layout="fused", query_scale=True, kv_scale="[]",
        poison="inf", seed=165,
        options={
            "causal": False, "chunk_size": 63, "num_splits": 8, "batch_invariant": True,
        },
    ),
    "bias and scores, other numbers": Case(
        "prefix_attention", (3,), (5,), max_seqlens=True, **COMMON,
        **BESIDE_PAGES | {"seed": 10795},
        options={
            "softmax_scale": 0.3, "causal": False, "chunk_size": 52, "batch_invariant": True,
            "return_lse": True,
        },
    ),
    # Sums of 32 products still did, and in two rows PyTorch's own error may be small by chance.
    "two rows": Case(
        "prefix_attention", (900, 871, 900), (0, 1, 1), heads=(8, 8), head_dims=(48, 32),
        dtype=torch.float32, page_size=30, padding_rows=3, pool_layout="sliced", table="int64",
        alibi=2, option_dtype=torch.float64, query_scale=True, tree_mask=True, kv_scale="[1]",
        out="contiguous", poison="inf", seed=656556711,
        options={"softmax_scale": -0.5, "window_size": (None, None), "num_splits": 3},
    ),
    # Beside that a cap, which makes 1e-7 of tanh 3e-6 of a score.
    "cap": Case("varlen_attention", (16, 1), **CAPPED),
    "cap, another length": Case("varlen_attention", (16, 2), **CAPPED),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_attention_of_float32_keeps_to_the_budget(case: Case, device: torch.device) -> None:
    check(case, device=device)


@pytest.mark.parametrize(("dim", "count"), [(40, 3), (88, 6), (150, 5)])
def test_attention_of_float32_adds_up_any_number_of_blocks(
    dim: int, count: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the interpreter by itself has one or two."""
    counts = []

    def short(dim: int, dtype: torch.dtype, _) -> tuple[int, ...]:
        widths = blocks(dim, dtype, target(90))
        counts.append(len(widths))
        return widths

    monkeypatch.setattr(portable, "blocks", short)
    case = Case("varlen_attention", (20, 3), (9, 1), heads=(4, 2), head_dims=(dim, 24),
                dtype=torch.float32)  # fmt: skip
    check(case, device=device)
    assert set(counts) == {count}
