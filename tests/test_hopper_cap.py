"""The PTX of ``kernels/hopper/cap.py``, run here number by number: what it computes, and how."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from tritonattn.kernels.hopper import cap

Lanes = NDArray[np.float32]  # of a warp
LANES, COUNT, GROUP = 32, 64, cap.GROUP.value
every_way = pytest.mark.parametrize("is_rough", [True, False], ids=["rough", "fine"])


def fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    return (np.float64(a) * b + c).astype(np.float32)


OPERATIONS: dict[str, Callable[..., Lanes]] = {
    "mov.f32": lambda a: a,
    "abs.f32": np.abs,
    "mul.f32": np.multiply,
    "add.f32": np.add,
    "max.f32": np.fmax,  # of a number and NaN the number
    "fma.rn.f32": fma,
    "ex2.approx.ftz.f32": np.exp2,
    "rcp.approx.ftz.f32": lambda a: np.float32(1) / a,
    "tanh.approx.f32": np.tanh,
}


def run(ptx: str, operands: list[Lanes]) -> tuple[list[Lanes], Counter[str]]:
    """The results of a warp, which come first among the numbered registers, and how often each
    instruction ran.  Branches must be the whole warp's."""
    registers = {f"${i}": x for i, x in enumerate(operands, COUNT)}
    predicates: dict[str, NDArray[np.bool_]] = {}
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in ptx.strip("{} ").split(";"):
        while found := re.match(r"\s*(\w+):", line):
            labels[found[1]] = len(code)
            line = line[found.end() :]
        code.append(line.strip())

    def value(name: str) -> Lanes:
        return registers[name] if name in registers else np.full(LANES, name, np.float32)

    counts: Counter[str] = Counter()
    at = 0
    while at < len(code):
        operation, *names = code[at].replace(",", " ").split() or [".reg"]
        at += 1
        counts[operation] += 1
        if operation == ".reg":
            continue
        if operation == "bra":
            at = labels[names[0]]
        elif operation.startswith("@"):
            taken = predicates["p"] != operation.startswith("@!")
            assert len(set(taken.tolist())) == 1
            if taken[0]:
                at = labels[names[1]]
        elif operation.startswith("setp.gt"):
            found_p = value(names[1]) > value(names[2])
            predicates["p"] = found_p | predicates["p"] if ".or." in operation else found_p
        elif operation == "vote.sync.any.pred":
            predicates["p"] = np.full(LANES, predicates["p"].any())
        else:
            result = OPERATIONS[operation](*(value(name) for name in names[1:]))
            registers[names[0]] = np.asarray(result, np.float32)
    return [registers[f"${i}"] for i in range(COUNT)], counts


def capped(
    x: NDArray[np.float32], unit: float, gain: float, *, is_rough: bool, is_weight: bool = False,
    rest: float = 0.0, limits: tuple[float, float] | None = None,
) -> tuple[NDArray[np.float32], int]:  # fmt: skip
    """(results [COUNT, LANES] of x, how many of a thread's were not found by the polynomial).
    ``limits`` are those of its two rows."""
    low, high = limits or (1.0 / unit, 1.0 / unit)
    per_number = [[rest] * COUNT, [(low, high)[i // 2 % 2] for i in range(COUNT)]]
    per_number += [[unit] * COUNT, [gain] * COUNT]
    operands = [np.full(LANES, n, np.float32) for numbers in per_number for n in numbers]
    ptx = cap.capped_ptx(COUNT, is_rough, is_weight)
    with np.errstate(all="ignore"):
        found, counts = run(ptx, [*x, *operands])
    assert counts["ex2.approx.ftz.f32"] == COUNT * is_weight + counts["rcp.approx.ftz.f32"]
    return np.stack(found), counts["tanh.approx.f32"] + counts["rcp.approx.ftz.f32"]


def drawn(largest: float) -> NDArray[np.float32]:
    """Numbers of all sizes up to ``largest``, of both signs."""
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(np.log(largest) - 8.0, np.log(largest), (COUNT, LANES)))
    return (sizes * rng.choice([-1.0, 1.0], sizes.shape)).astype(np.float32)


@every_way
@pytest.mark.parametrize("softcap", [0.1, 1.0, 5.0, 30.0, 50.0, 150.0])
def test_small_scores_take_no_exponential_but_their_weights(softcap: float, is_rough: bool) -> None:
    unit, gain = 0.088 / softcap, 1.4427 * softcap
    x = drawn(0.9999 / unit)
    found, others = capped(x, unit, gain, is_rough=is_rough)
    unit, gain = float(np.float32(unit)), float(np.float32(gain))
    assert others == 0
    np.testing.assert_allclose(found, gain * np.tanh(unit * x), rtol=7.5e-6 if is_rough else 9e-7)


@every_way
@pytest.mark.parametrize("size", [1.001, 3.0, 1e4, 1e30])
def test_large_scores_are_capped(size: float, is_rough: bool) -> None:
    x = np.copysign(np.abs(drawn(1.0)) + np.float32(size), drawn(1.0))
    found, others = capped(x, 1.0, 40.0, is_rough=is_rough)
    assert others == COUNT
    np.testing.assert_allclose(found, 40.0 * np.tanh(np.float64(x)), rtol=1e-6)


@every_way
@pytest.mark.parametrize("wide", [(0,), (63,), (17,), (0, 9), (8, 16, 62), tuple(range(COUNT))])
def test_one_large_score_is_its_groups_alone(wide: tuple[int, ...], is_rough: bool) -> None:
    """And weights are exponentials of all."""
    x = drawn(0.99)
    for i in wide:
        x[i, i % LANES] = -2.5
    found, others = capped(x, 1.0, 7.0, is_rough=is_rough, is_weight=True, rest=-3.0)
    assert others == GROUP * len({i // GROUP for i in wide})
    true = np.exp2(7.0 * np.tanh(np.float64(x)) - 3.0)
    np.testing.assert_allclose(found, true, rtol=5e-5)


@every_way
def test_nan_stays_and_infinity_is_the_cap(is_rough: bool) -> None:
    x = drawn(0.9)
    x[5], x[20, 3], x[33, 4] = np.nan, np.inf, -np.inf
    found, others = capped(x, 1.0, 7.0, is_rough=is_rough)
    assert others == 2 * GROUP  # NaN is no reason
    assert np.isnan(found[5]).all()
    assert (found[20, 3], found[33, 4]) == (7.0, -7.0)
    assert np.isfinite(np.delete(found, 5, 0)).all()


@pytest.mark.parametrize("row", [0, 1])
def test_a_rows_limit_is_its_own(row: int) -> None:
    """Infinity is that of what is no row, a negative one that of polynomials out of range."""
    x = drawn(0.5)
    mine = [i for i in range(COUNT) if i // 2 % 2 == row]
    x[mine] *= 1e6
    limits = (np.inf, 1.0) if row == 0 else (1.0, np.inf)
    assert capped(x, 1.0, 7.0, is_rough=True, limits=limits)[1] == 0
    assert capped(x, 1.0, 7.0, is_rough=True, limits=limits[::-1])[1] == COUNT
    assert capped(drawn(0.5), 1.0, 7.0, is_rough=True, limits=(-1.0, -1.0))[1] == COUNT
