"""ALiBi's slopes and Llama 4's attention temperature: the contract's own numbers."""

# ruff: noqa: E501 -- one case a row

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonattn import (
    ArgumentTypeError,
    ArgumentValueError,
    alibi_slopes,
    attention_temperature,
)


@pytest.mark.parametrize(
    ("num_heads", "exponents"),
    [
        (1, [-8]),
        (2, [-4, -8]),
        (3, [-4, -8, -2]),
        (6, [-2, -4, -6, -8, -1, -3]),
        (8, [-1, -2, -3, -4, -5, -6, -7, -8]),
        (12, [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5]),
        (16, [-0.5 * i for i in range(1, 17)]),
    ],
)
def test_alibi_slopes_are_those_of_the_paper(
    num_heads: int, exponents: list[float], device: torch.device
) -> None:
    slopes = alibi_slopes(num_heads, device=device)
    assert slopes.dtype == torch.float32
    assert slopes.device.type == device.type
    assert slopes.tolist() == torch.tensor([2.0**e for e in exponents]).tolist()


@given(num_heads=st.integers(1, 300))
def test_alibi_slopes_of_extra_heads_are_the_odd_ones_of_twice_as_many(num_heads: int) -> None:
    power = 1 << (num_heads.bit_length() - 1)
    expected = torch.cat([alibi_slopes(power), alibi_slopes(2 * power)[::2]])[:num_heads]
    assert torch.equal(alibi_slopes(num_heads), expected)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_alibi_slopes_are_on_the_asked_device(device: str | None) -> None:
    assert alibi_slopes(4, device=device).device == torch.device("cpu")


@pytest.mark.parametrize(
    ("num_heads", "error", "got"),
    [
        (0, ArgumentValueError, "got 0."),
        (-3, ArgumentValueError, "got -3."),
        (2.0, ArgumentTypeError, "got float 2.0."),
        (True, ArgumentTypeError, "got bool True."),
        (None, ArgumentTypeError, "got None."),
    ],
)
def test_alibi_slopes_refuses_what_is_no_number_of_heads(
    num_heads: Any, error: type[Exception], got: str
) -> None:
    with pytest.raises(error) as caught:
        alibi_slopes(num_heads)
    message = str(caught.value)
    assert message.startswith("alibi_slopes: num_heads must be an int of at least 1; ")
    assert got in message
    assert "Pass " in message.split(got)[1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_attention_temperature_gives_the_contracts_values(
    dtype: torch.dtype, device: torch.device
) -> None:
    positions = torch.tensor([0, 8190, 8191, 16382, 16383, 131071], dtype=dtype, device=device)
    factors = attention_temperature(positions)
    assert factors.dtype == torch.float32
    assert factors.device == positions.device
    expected = [1.0, 1.0, 1.069315, 1.069315, 1.109861, 1 + 0.1 * math.log(17)]
    assert [round(x, 6) for x in factors.tolist()] == [round(x, 6) for x in expected]


@given(
    positions=st.lists(st.integers(0, 2**31 - 2), min_size=1, max_size=20),
    floor_scale=st.integers(1, 10_000),
    attn_scale=st.floats(-2, 2),
)
def test_attention_temperature_counts_whole_steps(
    positions: list[int], floor_scale: int, attn_scale: float
) -> None:
    factors = attention_temperature(
        torch.tensor(positions), floor_scale=floor_scale, attn_scale=attn_scale
    )
    steps = [(p + 1) // floor_scale for p in positions]
    expected = torch.tensor([1 + attn_scale * math.log1p(n) for n in steps], dtype=torch.float64)
    torch.testing.assert_close(factors.double(), expected, rtol=2**-23, atol=2**-23)


def test_attention_temperature_of_no_positions_is_empty(device: torch.device) -> None:
    factors = attention_temperature(torch.empty(0, dtype=torch.int32, device=device))
    assert factors.shape == (0,)


POSITIONS = torch.arange(3)


@pytest.mark.parametrize(
    ("positions", "options", "error", "says"),
    [
        (None, {}, ArgumentTypeError, ("positions must be a tensor [n]", "None")),
        ([0, 1], {}, ArgumentTypeError, ("positions must be a tensor [n]", "list [0, 1]")),
        (POSITIONS.float(), {}, ArgumentTypeError, ("int32 or int64", "float32 [3]", "Pass positions.long().")),
        (POSITIONS[None], {}, ArgumentValueError, ("must have 1 axis, [n]", "int64 [1, 3]", "Pass positions.flatten().")),
        (POSITIONS, {"floor_scale": 0.0}, ArgumentValueError, ("floor_scale must be above 0", "got 0.0", "Llama 4")),
        (POSITIONS, {"floor_scale": -1.0}, ArgumentValueError, ("floor_scale must be above 0", "got -1.0")),
        (POSITIONS, {"floor_scale": math.inf}, ArgumentValueError, ("floor_scale must be a finite float", "got inf")),
        (POSITIONS, {"attn_scale": math.nan}, ArgumentValueError, ("attn_scale must be a finite float", "got nan")),
        (POSITIONS, {"attn_scale": "0.1"}, ArgumentTypeError, ("attn_scale must be a finite float", "str '0.1'")),
    ],
)  # fmt: skip
def test_attention_temperature_refuses_bad_arguments(
    positions: Any, options: dict[str, Any], error: type[Exception], says: tuple[str, ...]
) -> None:
    with pytest.raises(error) as caught:
        attention_temperature(positions, **options)
    message = str(caught.value)
    assert message.startswith("attention_temperature: ")
    for part in says:
        assert part in message
