"""Scales of any sign: scores rise with the products only where none is negative."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from launches import recorded

import tritonattn
from tritonattn.device import target
from tritonattn.testing import Case, check
from tritonattn.tuning.config import KernelConfig
from tritonattn.tuning.store import force

# Tiles that every row sees whole, where nothing is masked; few rows mask all of a cache.
SMALL = KernelConfig(block_m=64, block_n=16, pack=1, num_warps=4, num_stages=2)


@pytest.mark.parametrize("function", ["varlen", "prefix", "paged"])
@pytest.mark.parametrize("k_scale", [None, -1.5])
@pytest.mark.parametrize("scale", [-0.5, 0.0, 0.5])
def test_scales_of_any_sign_equal_the_oracle(
    scale: float, k_scale: float | None, function: str, device
):
    """Great scores of both signs, which overflow unless the maximum is the right one."""
    case = Case(f"{function}_attention", (48,), (2,), heads=(1, 1), head_dims=(16, 16), seed=3)
    args, options = case.build(device)
    args = tuple(40 * x if x.is_floating_point() else x for x in args)
    options |= {"softmax_scale": scale, "k_scale": k_scale, "causal": False}
    with force(SMALL):
        check(case.function, *args, device=device, **options)


def is_signed(case: Case, **more: Any) -> bool:
    """Whether a call's binary takes scales that may be negative."""
    args, options = case.build()
    with recorded(target(80)) as launches:
        getattr(tritonattn, case.function)(*args, **options, **more)
    spec: Any = launches[0].constants["SPEC"]
    return spec.HAS_SIGNED_SCALE


def test_binaries_take_negative_scales_only_where_there_may_be_any():
    case = Case("paged_attention", (5,), cache_dtype=torch.float8_e4m3fn)
    assert not is_signed(case)
    assert not is_signed(case, softmax_scale=0.5)
    assert is_signed(case, softmax_scale=-0.5)
    assert is_signed(case, k_scale=-2.0)
    assert is_signed(case, k_scale=torch.ones(1))  # its value is on the device
    assert is_signed(dataclasses.replace(case, query_scale=True))
