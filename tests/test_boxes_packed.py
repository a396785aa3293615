"""Packed keys that are copied as boxes give what those that are read through pointers give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import recorded
from test_attention import CASES

import tritonattn
from tritonattn.device import target
from tritonattn.errors import UnsupportedError
from tritonattn.strategies import OPTIONS
from tritonattn.testing import Case, check
from tritonattn.tuning import store
from tritonattn.tuning.config import KernelConfig

# Tiles that are small beside the drawn lengths: else all of them would be edges.
POINTERS = KernelConfig(block_m=64, block_n=16, pack=1, num_warps=4, num_stages=2)
BOXES = KernelConfig(64, 16, 1, 4, 2, "boxes")
PACKED = ["varlen", "prefix"]
DTYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", PACKED)
def test_boxes_beside_poison_equal_the_oracle(function: str, dtype: torch.dtype, causal, device):
    """Boxes reach into the neighbours' rows, and past the last: of 0, 1, 2 and 3 full tiles."""
    case = Case(
        f"{function}_attention", (7, 16, 35, 48), (2, 17, 1, 3), heads=(2, 1), head_dims=(16, 32),
        dtype=dtype, poison="nan",
    )  # fmt: skip
    with store.force(BOXES):
        check(case, device=device, causal=causal)


@pytest.mark.parametrize("function", PACKED)
def test_boxes_that_reach_into_a_neighbour_use_nothing_of_it(function: str, device):
    case = Case(f"{function}_attention", (7, 48), (7, 30), heads=(2, 1), head_dims=(16, 16))
    results = []
    for what in (1.0, float("nan"), float("inf")):
        args, options = case.build(device)
        for rows in args[1:3]:  # packed keys and values
            rows[7:] = what
        with store.force(BOXES):
            results.append(getattr(tritonattn, case.function)(*args, **options)[:7])
    assert bool(results[0].isfinite().all())
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("function", PACKED)
@settings(max_examples=4)
@given(data=st.data())
def test_boxes_equal_the_oracle_with_every_option(function: str, data: Any, device):
    # Strides of 16 bytes, which boxes need.
    shape = {"max_len": 45, "heads": ((2, 1), (3, 1)), "head_dims": ((16, 16), (32, 16), (64, 32))}
    options = OPTIONS - {"layout"}
    case = data.draw(CASES[function](options=options, dtypes=DTYPES, **shape))
    with store.force(BOXES):
        check(case, device=device)


@pytest.mark.parametrize("layout", ["head_major", "contiguous"])
def test_boxes_of_any_layout_equal_pointers_bit_for_bit(layout: str, device):
    case = Case(
        "varlen_attention", (40, 0, 9), (17, 3, 9), heads=(2, 1), head_dims=(32, 48), layout=layout
    )
    args, options = case.build(device)
    results = []
    for config in (POINTERS, BOXES):
        with store.force(config):
            results.append(tritonattn.varlen_attention(*args, **options))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("arch", "change", "reason"),
    [
        (80, {}, "of what TMA copies"),
        (120, {}, "of what TMA copies"),
        ("gfx942", {}, "of what TMA copies"),
        (90, {"dtype": torch.float32}, "16-bit"),
        (90, {"head_dims": (192, 128)}, "two boxes"),
        (90, {"layout": "sliced"}, "such strides"),
        (90, {"function": "paged_attention"}, "no packed keys"),
    ],
)
def test_boxes_that_cannot_be_had_are_refused(arch: int | str, change: dict, reason: str):
    fields: dict[str, Any] = {
        "function": "varlen_attention", "k_lens": (5,), "q_lens": (5,), "head_dims": (128, 128),
        "dtype": torch.float16,
    }  # fmt: skip
    case = Case(**fields | change)
    args, options = case.build()
    with (
        recorded(target(arch), store.lookup),
        store.force(BOXES),
        pytest.raises(UnsupportedError, match=reason),
    ):
        getattr(tritonattn, case.function)(*args, **options)
