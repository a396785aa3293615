"""Merging attention states."""

# ruff: noqa: E501 -- one case a row

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tritonattn import (
    ArgumentTypeError,
    ArgumentValueError,
    UnsupportedError,
    merge_states,
    reference,
    rules,
)
from tritonattn.device import describe, target
from tritonattn.merge import merge_partials
from tritonattn.testing import assert_close, generator, normal, same_bytes

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# numpy says so of the NaN and infinities that are there on purpose.
not_a_number = pytest.mark.filterwarnings(
    "ignore:invalid value:RuntimeWarning", "ignore:overflow encountered:RuntimeWarning"
)

T, H, DV = 5, 3, 20


def states(
    num: int,
    dtype: torch.dtype,
    device: Any,
    *,
    empty: float = 0.0,
    shape: tuple[int, int, int] = (T, H, DV),
    seed: int = 0,
) -> tuple[list[Tensor], list[Tensor]]:
    """``num`` outs and lses; a share ``empty`` of the rows is empty and holds NaN."""
    gen = generator(seed)
    tokens, heads, _ = shape
    outs, lses = [], []
    for _ in range(num):
        out = normal(*shape, dtype=dtype, generator=gen)
        lse = 3 * torch.randn(heads, tokens, generator=gen)
        is_empty = torch.rand(heads, tokens, generator=gen) < empty
        outs.append(out.masked_fill(is_empty.T[..., None], math.nan).to(device))
        lses.append(lse.masked_fill(is_empty, -math.inf).to(device))
    return outs, lses


def empty_state(dtype: torch.dtype, device: Any, filled: float = math.nan) -> tuple[Tensor, Tensor]:
    out = torch.full((T, H, DV), filled, dtype=dtype, device=device)
    return out, torch.full((H, T), -math.inf, device=device)


def in_float32(outs: list[Tensor], lses: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out, lse = reference.merge_states(outs, lses, compute_dtype=torch.float32)
    return out.to(dtype), lse


# Empty states


@every_dtype
@pytest.mark.parametrize("num", [1, 2, 3, 9])
def test_merge_states_of_empties_is_empty(
    num: int, dtype: torch.dtype, device: torch.device
) -> None:
    outs, lses = zip(*[empty_state(dtype, device) for _ in range(num)], strict=True)
    out, lse = merge_states(outs, lses)
    assert (out == 0).all()
    assert not out.signbit().any()
    assert (lse == -math.inf).all()


@not_a_number
@every_dtype
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("filled", [math.nan, math.inf, 7.0])
def test_merge_states_passes_one_state_unchanged(
    filled: float, place: int, dtype: torch.dtype, device: torch.device
) -> None:
    gen = generator(0)
    out = normal(T, H, DV, dtype=dtype, generator=gen)
    smallest = 2.0**-24 if dtype == torch.float16 else 2.0**-133
    odd = [0.0, -0.0, smallest, -smallest, math.inf, -math.inf, torch.finfo(dtype).max]
    out[0, 0, : len(odd)] = torch.tensor(odd, dtype=torch.float64).to(dtype)
    lse = 30 * torch.randn(H, T, generator=gen)
    lse[0, :3] = torch.tensor([0.0, -0.0, 1e-40])
    out, lse = out.to(device), lse.to(device)
    parts = [empty_state(dtype, device, filled) for _ in range(2)]
    parts.insert(place, (out, lse))
    for chosen in (parts, [(out, lse)]):
        merged, merged_lse = merge_states(*zip(*chosen, strict=True))
        assert same_bytes(merged, out)
        assert same_bytes(merged_lse, lse)


@every_dtype
@given(data=st.data())
def test_merge_states_does_not_see_empty_states(
    dtype: torch.dtype, device: torch.device, data: st.DataObject
) -> None:
    num = data.draw(st.integers(1, 6))
    outs, lses = states(num, dtype, device, seed=data.draw(st.integers(0, 99)))
    out, lse = merge_states(outs, lses)
    for place in data.draw(st.lists(st.integers(0, num), min_size=1, max_size=4)):
        nothing, minus_infinity = empty_state(dtype, device)
        outs.insert(place, nothing)
        lses.insert(place, minus_infinity)
    padded, padded_lse = merge_states(outs, lses)
    assert same_bytes(padded, out)
    assert same_bytes(padded_lse, lse)


# Values


@every_dtype
@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 17])
@pytest.mark.parametrize("empty", [0.0, 0.4])
def test_merge_states_is_the_oracles(
    empty: float, num: int, dtype: torch.dtype, device: torch.device
) -> None:
    outs, lses = states(num, dtype, device, empty=empty)
    out, lse = merge_states(outs, lses)
    oracle, oracle_lse = reference.merge_states(outs, lses)
    fair, fair_lse = in_float32(outs, lses, dtype)
    assert_close(out, oracle, fair, dtype=dtype)
    assert_close(lse, oracle_lse, fair_lse, dtype=torch.float32, name="lse")


@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 2, 8), (3, 0, 8), (700, 1, 16), (2, 71, 512)])
def test_merge_states_takes_any_shape(shape: tuple[int, int, int], device: torch.device) -> None:
    outs, lses = states(3, torch.float32, device, shape=shape, empty=0.2)
    out, lse = merge_states(outs, lses)
    oracle, oracle_lse = reference.merge_states(outs, lses)
    fair, fair_lse = in_float32(outs, lses, torch.float32)
    assert_close(out, oracle, fair, dtype=torch.float32)
    assert_close(lse, oracle_lse, fair_lse, dtype=torch.float32, name="lse")


def test_merge_states_takes_lse_as_a_natural_logarithm(device: torch.device) -> None:
    """12 keys of value 0, then 4 of value 1, all with logit 0; and 8 keys in two halves."""
    outs = torch.tensor([0.0, 1.0], device=device).view(2, 1, 1, 1)
    lses = torch.tensor([12.0, 4.0], device=device).log().view(2, 1, 1)
    out, lse = merge_states(outs, lses)
    assert out.item() == pytest.approx(0.25, abs=2**-22)
    assert lse.item() == pytest.approx(math.log(16), abs=2**-20)
    _, lse = merge_states(outs, torch.full((2, 1, 1), math.log(4), device=device))
    assert lse.item() == pytest.approx(2.0794415, abs=2**-20)


@every_dtype
def test_merge_states_is_attention_in_one_pass(dtype: torch.dtype, device: torch.device) -> None:
    gen = generator(1)
    num_keys, cuts = 40, (0, 7, 7, 24, 40)
    q = normal(T, H, 32, dtype=dtype, generator=gen, device=device)
    k, v = (normal(num_keys, 1, d, dtype=dtype, generator=gen, device=device) for d in (32, DV))

    def attend(first: int, last: int, compute_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ends = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (T, last - first))
        keys = (k[first:last], v[first:last])
        options = {"causal": False, "return_lse": True, "compute_dtype": compute_dtype}
        return reference.varlen_attention(q, *keys, *ends, **options)

    whole, whole_lse = attend(0, num_keys, torch.float64)
    fair, fair_lse = attend(0, num_keys, dtype)
    parts = [attend(a, b, torch.float64) for a, b in itertools.pairwise(cuts)]
    outs, lses = zip(*parts, strict=True)
    out, lse = merge_states([x.to(dtype) for x in outs], [x.float() for x in lses])
    assert_close(out, whole, fair, dtype=dtype)
    assert_close(lse, whole_lse, fair_lse, dtype=torch.float32, name="lse")


@not_a_number
def test_merge_states_of_far_apart_lses_is_the_greater(device: torch.device) -> None:
    outs, _ = states(2, torch.float32, device)
    for low, high in ((-60_000.0, 0.0), (0.0, 60_000.0), (-3e38, 3e38)):
        lses = [torch.full((H, T), x, device=device) for x in (low, high)]
        out, lse = merge_states(outs, lses)
        assert same_bytes(out, outs[1])
        assert same_bytes(lse, lses[1])


# Ways to pass the states


@every_dtype
def test_merge_states_takes_lists_tuples_and_stacked_tensors(
    dtype: torch.dtype, device: torch.device
) -> None:
    outs, lses = states(3, dtype, device, empty=0.3)
    expected = merge_states(outs, lses)
    transposed = torch.stack([x.T for x in lses]).transpose(1, 2)  # kept as [n, T, H]
    head_major = torch.stack([x.transpose(0, 1) for x in outs]).transpose(1, 2)
    for some_outs, some_lses in (
        (tuple(outs), tuple(lses)),
        (torch.stack(outs), torch.stack(lses)),
        (outs, torch.stack(lses)),
        (head_major, lses),
        (torch.stack(outs), transposed),
        ([x.transpose(0, 1).contiguous().transpose(0, 1) for x in outs], list(transposed)),
    ):
        out, lse = merge_states(some_outs, some_lses)
        assert same_bytes(out, expected[0])
        assert same_bytes(lse, expected[1])


def test_merge_states_of_the_same_states_has_the_same_bits(device: torch.device) -> None:
    outs, lses = states(7, torch.float32, device, empty=0.2, shape=(64, 4, 128))
    first, second = (merge_states(outs, lses) for _ in range(2))
    assert same_bytes(first[0], second[0])
    alone = merge_states([x[9:10] for x in outs], [x[:, 9:10] for x in lses])
    assert same_bytes(alone[0], first[0][9:10])
    assert same_bytes(alone[1], first[1][:, 9:10])


# What attention calls after it split its keys


@every_dtype
@pytest.mark.parametrize("with_lse", [True, False])
def test_merge_partials_writes_any_strides_and_nothing_else(
    with_lse: bool, dtype: torch.dtype, device: torch.device
) -> None:
    outs, lses = states(3, torch.float32, device, empty=0.4)
    parts = torch.full((4, T + 1, H + 2, DV + 3), math.nan, device=device)
    parts = parts[1:, 1:, 2:, :DV].copy_(torch.stack(outs))
    part_lses = torch.full((5, H + 1, T + 4), math.nan, device=device)
    part_lses = part_lses[2:, 1:, 4:].copy_(torch.stack(lses))
    around = torch.full((H + 1, T + 2, DV + 5), 9.0, dtype=dtype, device=device)
    around_lse = torch.full((H + 2, T + 3), 9.0, device=device)
    out = around[1:, 2:, 5:].transpose(0, 1)
    lse = around_lse[2:, 3:] if with_lse else None
    merge_partials(parts, part_lses, out, lse, describe(device))

    expected, expected_lse = merge_states(outs, lses)
    assert same_bytes(out, expected.to(dtype))
    if lse is not None:
        assert same_bytes(lse, expected_lse)
        lse.fill_(9.0)
    out.fill_(9.0)
    assert (around == 9.0).all()
    assert (around_lse == 9.0).all()


# What a bad call gets


def good() -> tuple[list[Tensor], list[Tensor]]:
    return states(2, torch.float16, "cpu")


def second(change: Callable[[Tensor], Any]) -> Callable[[list[Tensor]], list[Any]]:
    """Changes the second state alone."""
    return lambda parts: [parts[0], change(parts[1])]


REFUSED = [
    # outs
    ("outs", lambda _: None, ArgumentTypeError, "outs must be a list of tensors [T, H, Dv] or one tensor [n, T, H, Dv]", "None", "Pass [outs]"),
    ("outs", lambda _: [], ArgumentValueError, "outs must hold at least one state", "none", "Pass n >= 1"),
    ("outs", lambda x: torch.stack(x)[:0], ArgumentValueError, "outs must hold at least one state", "none", "Pass n >= 1"),
    ("outs", lambda x: x[0], ArgumentValueError, "outs must have 4 axes, [n, T, H, Dv]", "float16 [5, 3, 20]", "Stack the states"),
    ("outs", second(lambda _: 1.0), ArgumentTypeError, "outs[1] must be a tensor [T, H, Dv]", "float 1.0", "Pass outs[1] as"),
    ("outs", second(lambda x: x[0]), ArgumentValueError, "outs[1] must have 3 axes, [T, H, Dv]", "float16 [3, 20]", "Reshape"),
    ("outs", lambda x: [y.double() for y in x], ArgumentTypeError, "outs[0] must be float16, bfloat16 or float32", "float64", "Pass outs[0].float()."),
    ("outs", second(lambda x: x.float()), ArgumentTypeError, "outs[1] must have the dtype of outs[0], float16", "float32", "Pass outs[1].to(outs[0].dtype)."),
    ("outs", second(lambda x: x[:4]), ArgumentValueError, "outs[1] must have the shape of outs[0], [5, 3, 20]", "float16 [4, 3, 20]", "same queries"),
    ("outs", second(lambda x: x.to("meta")), ArgumentValueError, "outs[1] must be on the device of outs[0], cpu", "on meta", "Pass outs[1].to(outs[0].device)."),
    ("outs", second(lambda x: x.mT.contiguous().mT), ArgumentValueError, "outs[1] must have stride 1 on its last axis", "strides [60, 1, 3]", "Pass outs[1].contiguous()."),
    ("outs", second(lambda x: x.requires_grad_()), ArgumentValueError, "outs[1] must not require grad", "requires_grad=True", "torch.no_grad()"),
    # lses
    ("lses", lambda _: 0.5, ArgumentTypeError, "lses must be a list of tensors [H, T] or one tensor [n, H, T]", "0.5", "Pass [lses]"),
    ("lses", lambda x: x[:1], ArgumentValueError, "lses must hold one lse for each of the 2 outputs", "got 1.", "Pass as many lses as outs."),
    ("lses", lambda x: x[0], ArgumentValueError, "lses must have 3 axes, [n, H, T]", "float32 [3, 5]", "Stack the states"),
    ("lses", second(lambda x: x.half()), ArgumentTypeError, "lses[1] must be float32", "float16 [3, 5]", "Pass lses[1].float()."),
    ("lses", second(lambda x: x.T), ArgumentValueError, "lses[1] must end in [H, T] = [3, 5], as outs[0] is [5, 3, 20]", "float32 [5, 3]", "transpose"),
    ("lses", second(lambda x: x.to("meta")), ArgumentValueError, "lses[1] must be on the device of outs[0], cpu", "on meta", "Pass lses[1].to(outs[0].device)."),
    ("lses", second(lambda x: x.requires_grad_()), ArgumentValueError, "lses[1] must not require grad", "requires_grad=True", "lses[1].detach()"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "error", "rule", "got", "fix"), REFUSED)
def test_merge_states_refuses_bad_states(
    name: str,
    change: Callable[[list[Tensor]], Any],
    error: type[Exception],
    rule: str,
    got: str,
    fix: str,
) -> None:
    outs, lses = good()
    args: tuple[Any, Any] = (change(outs), lses) if name == "outs" else (outs, change(lses))
    with pytest.raises(error) as caught:
        merge_states(*args)
    message = str(caught.value)
    assert message.startswith(f"merge_states: {rule}")
    assert got in message
    assert fix in message.split("; got ")[1]


def test_merge_states_takes_what_requires_grad_where_grad_mode_is_off(
    device: torch.device,
) -> None:
    outs, lses = states(2, torch.float32, device)
    expected, _ = merge_states(outs, lses)
    with torch.no_grad():
        out, _ = merge_states([x.requires_grad_() for x in outs], lses)
    assert same_bytes(out, expected)


def test_merge_states_refuses_bfloat16_where_the_gpu_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tritonattn.device.describe", lambda _: target(75, name="Tesla T4"))
    outs, lses = states(2, torch.bfloat16, "cpu")
    with pytest.raises(UnsupportedError, match=r"merge_states: outs may be bfloat16 .* sm_80"):
        merge_states(outs, lses)


def test_merge_states_refuses_before_it_allocates() -> None:
    """The rules read no value: they hold for tensors that have none."""
    outs, lses = states(2, torch.float16, "cpu")
    with pytest.raises(ArgumentValueError, match="lses"):
        merge_states([x.to("meta") for x in outs], lses)
    assert rules.COMPUTE_DTYPES == DTYPES
