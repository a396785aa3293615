"""Hopper's kernel with a cap against the oracle: scores far below it, around it, far above it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import hopper
import pytest
import torch
from faults import PREFIX, VARLEN, every_function

import tritonattn
from tritonattn.inputs import TENSORS
from tritonattn.plan import HOPPER
from tritonattn.testing import Case, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hopper.is_here(), reason="needs a GPU of compute capability 9.0"),
]

bf16, fp16 = torch.bfloat16, torch.float16
every_dtype = pytest.mark.parametrize("dtype", [bf16, fp16], ids=["bf16", "fp16"])
LENS = (700, 333, 1, 0, 900)
LONG = Case(VARLEN, LENS, LENS, heads=(4, 2), head_dims=(64, 64), dtype=bf16)
LARGEST = 5.0 * 8.0  # about what q k comes to, of 64 dims


@pytest.fixture(autouse=True)
def counts() -> Iterator[Any]:
    """Of kinds of calls, by the kernel that ran them."""
    with hopper.preferred() as found:
        yield found
    assert found[HOPPER]


@every_function
@every_dtype
@pytest.mark.parametrize("softcap", [50.0, 30.0, 5.0, 1.0, 0.1])
def test_scores_of_any_size_beside_the_cap(function: str, dtype, softcap: float, device) -> None:
    for size in (1e-4, 0.1, 0.9, 1.1, 3.0, 100.0, 1e6):
        options = {"softcap": softcap, "softmax_scale": size * softcap / LARGEST}
        case = dataclasses.replace(LONG, function=function, dtype=dtype, options=options)
        check(case, device=device, return_lse=True, note=f"{size} caps")


def mixed(case: Case, device: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Among small scores large ones: of some queries, of some keys."""
    args, options = case.build(device)
    named = dict(zip(TENSORS[case.function], args, strict=True))
    named["q"][::97] *= 30.0
    for name in ("k", "k_cache"):
        if name in named:
            named[name].flatten(0, -3)[::61] *= 30.0
    return args, options


FEATURES: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "ALiBi": {"alibi": 2},
    "sinks": {"sinks": True},
    "query_scale": {"query_scale": True},
    "window": {"options": {"window_size": (400, None)}},
    "not causal": {"options": {"causal": False}},
    "all": {
        "alibi": 1, "sinks": True, "query_scale": True,
        "options": {"window_size": (500, None), "chunk_size": 600},
    },
}  # fmt: skip


@every_function
@pytest.mark.parametrize("feature", FEATURES)
def test_large_scores_among_small_ones(function: str, feature: str, device) -> None:
    fields = dict(FEATURES[feature])
    fields["options"] = fields.get("options", {}) | {"softcap": 20.0}
    case = dataclasses.replace(LONG, function=function, **fields)
    args, options = mixed(case, device)
    check(function, *args, **options, return_lse=True)


@pytest.mark.parametrize("form", ["lanes+mid", "turns+lanes"])
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
def test_large_scores_in_any_form(form: str, block_n: int, dims: tuple[int, int], device) -> None:
    case = dataclasses.replace(LONG, head_dims=dims, dtype=fp16, options={"softcap": 20.0})
    args, options = mixed(case, device)
    with hopper.preferred(form=form, block_n=block_n, num_stages=2):
        check(case.function, *args, **options, return_lse=True)
    check(LONG, device=device)  # for counts


@every_dtype
def test_nan_stays_and_infinity_is_the_cap(dtype, device) -> None:
    """A product may be infinite where the oracle's is finite, far above the cap."""
    case = dataclasses.replace(LONG, dtype=dtype, options={"softcap": 20.0, "causal": False})
    (q, k, *rest), options = case.build(device)
    q[:, :, 0] = torch.sign(q[:, :, 0])
    k[40::300] = 0.0
    k[40::300, :, 0] = torch.finfo(dtype).max
    q[:, :, 0] *= 4.0
    check(VARLEN, q, k, *rest, **options, return_lse=True)
    q[710] = torch.nan
    out = tritonattn.varlen_attention(q, k, *rest, **options)
    assert out[710].isnan().all()
    assert out[:700].isfinite().all()


@pytest.mark.parametrize("function", [VARLEN, PREFIX])
def test_a_sequences_bits_are_its_own_whatever_the_next_ones_scores(function: str, device) -> None:
    """The next one's queries and keys stand in the same tiles."""
    case = dataclasses.replace(LONG, function=function, options={"softcap": 20.0})
    args, options = case.build(device)
    named = dict(zip(TENSORS[function], args, strict=True))
    call = getattr(tritonattn, function)
    first = call(*args, **options).clone()
    start = LENS[0] + LENS[1] + 1
    named["q"][start:] *= 1000.0
    named["k"][start:] *= 1000.0
    assert torch.equal(call(*args, **options)[:start], first[:start])
    assert not torch.equal(call(*args, **options)[start:], first[start:])
