"""float32 calls that hunts found just past the error budget: each is now within it."""

from __future__ import annotations

import pytest
import torch

from tritonattn.inputs import Case
from tritonattn.testing import check

COMMON = {
    "heads": (14, 2), "head_dims": (128, 128), "dtype": torch.float32, "layout": "head_major",
    "alibi": 1, "query_scale": True, "out": "sliced",
}  # fmt: skip
BESIDE_PAGES = {
    "page_size": 6, "pool_layout": "head_major", "table": "int64", "option_dtype": torch.bfloat16,
    "poison": "nan", "seed": 3,
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
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_attention_of_float32_keeps_to_the_budget(case: Case, device: torch.device) -> None:
    check(case, device=device)
