"""The error budget must refuse what is wrong, pass what is right, and say where."""

from __future__ import annotations

import functools
import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings

from tritonattn import reference
from tritonattn.strategies import paged_cases, prefix_cases, varlen_cases
from tritonattn.testing import Budget, Case, assert_close, check, error_factor, poison, same_bytes

CASE = Case("paged_attention", (9, 0, 21), (3, 2, 1), options={"return_lse": True}, padding_rows=2)


def wrong(change):
    """An attention function that is right but for ``change(out, lse)``, in place."""

    @functools.wraps(reference.paged_attention)
    def function(*args, return_lse=False, out=None, **options):
        dtype = args[0].dtype
        result, lse = reference.paged_attention(*args, **options, return_lse=True)
        result, lse = result.to(dtype), lse.float()
        change(result, lse)
        out = result if out is None else out.copy_(result)
        return (out, lse) if return_lse else out

    return function


def run(change, case=CASE, **options):
    args, built = case.build()
    return check(wrong(change), *args, **built | options)


def test_check_passes_what_is_right():
    out, lse = run(lambda out, lse: None)
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out, lse: out[5, 3, 7].add_(0.05), r"out\[5, 3, 7\]"),
        (lambda out, lse: out[5, 3, 7].fill_(math.nan), r"out\[5, 3, 7\] is nan"),
        (lambda out, lse: out[3, 0, 0].fill_(1e-7), r"out\[3, 0, 0\].*must be exact"),
        (lambda out, lse: out[7, 0, 0].fill_(math.nan), r"out\[7, 0, 0\].*must be exact"),
        (lambda out, lse: lse[1, 2].add_(0.1), r"lse\[1, 2\]"),
        (lambda out, lse: lse[1, 3].fill_(-1e30), r"lse\[1, 3\].*must be exact"),
        (lambda out, lse: lse[1, 2].fill_(-math.inf), r"lse\[1, 2\] is -inf"),
    ],
)
def test_check_refuses_what_is_wrong_and_says_where(change, message):
    with pytest.raises(AssertionError, match=message):
        run(change)


def test_check_prints_the_call_and_the_case(monkeypatch):
    function = wrong(lambda out, lse: out.add_(1))
    monkeypatch.setattr("tritonattn.api.paged_attention", function)
    with pytest.raises(AssertionError) as caught:
        check(CASE, softcap=3.0)
    text = str(caught.value)
    assert "paged_attention(float16[8, 4, 64], " in text
    assert "int32[3] [9, 0, 21], return_lse=True, cu_seqlens_q=int32[4] [0, 3, 5, 6]" in text
    assert "softcap=3.0" in text
    assert f"check({CASE!r}, device='cpu')" in text


def test_check_finds_rows_that_are_not_written():
    def lazy(*args, out=None, **options):
        out[:-2] = reference.paged_attention(*args, **options)[:-2].half()
        return out

    lazy.__name__ = "paged_attention"
    args, options = replace(CASE, options={}).build()
    with pytest.raises(AssertionError, match=r"out\[6, 0, 0\] is nan, not 0"):
        check(lazy, *args, **options)


def test_check_finds_writes_around_out():
    def wide(*args, out=None, **options):
        out._base[-1] = 1.0
        return out.copy_(reference.paged_attention(*args, **options))

    wide.__name__ = "paged_attention"
    args, options = replace(CASE, options={}, out="sliced").build()
    with pytest.raises(AssertionError, match="memory around out was written"):
        check(wide, *args, **options)


def test_check_compares_dtypes_and_shapes():
    args, options = replace(CASE, options={}).build()
    with pytest.raises(AssertionError, match=r"must be float16 \[8, 4, 64\]; got float64"):
        check(reference.paged_attention, *args, **options, poison_out=False)


def test_assert_close_allows_twice_pytorchs_error_and_one_rounding_step():
    oracle = torch.tensor([1.0, 1.0], dtype=torch.float64)[:, None]
    same = oracle + 1e-3
    step = torch.finfo(torch.float16).eps
    right, budget = {"dtype": torch.float32}, 2e-3 + torch.finfo(torch.float32).eps
    assert_close((oracle + budget * 0.999).float(), oracle, same, **right)
    with pytest.raises(AssertionError, match="off by"):
        assert_close((oracle + budget * 1.001).float(), oracle, same, **right)
    assert_close((oracle + step).half(), oracle, oracle, dtype=torch.float16)
    with pytest.raises(AssertionError, match="off by"):
        assert_close((oracle + 2 * step).half(), oracle, oracle, dtype=torch.float16)


def test_budget_holds_for_many_results_and_asks_the_device_once(monkeypatch):
    oracle = torch.tensor([[1.0, -2.0], [0.0, 0.0]], dtype=torch.float64)
    budget = Budget(oracle, oracle + 1e-3, dtype=torch.float32)
    asked = []
    real = torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda x: asked.append(1) or real(x))
    right = (oracle + 1e-3 * (oracle != 0)).float()
    budget.check(right)
    assert len(asked) == 1
    budget.check((oracle + 2.5e-3 * (oracle != 0)).float(), factor=3.0)
    for change, message in [
        (lambda x: x[0].mul_(1.01), r"out\[0, 1\] .*off by"),
        (lambda x: x[0, 0].fill_(torch.nan), r"out\[0, 0\] is nan"),
        (lambda x: x[1, 1].fill_(1e-30), r"out\[1, 1\] .*must be exact"),
    ]:
        bad = right.clone()
        change(bad)
        with pytest.raises(AssertionError, match=message):
            budget.check(bad)
    budget.check(right)


def test_error_factor_follows_the_options():
    args, options = CASE.build()
    fp8, _ = replace(CASE, cache_dtype=torch.float8_e5m2).build()
    assert error_factor(args, options) == 2
    assert error_factor(args, options | {"softcap": 5.0}) == 3
    assert error_factor(fp8, options | {"softcap": 5.0}) == 4


# Inputs


def test_case_is_built_the_same_each_time_and_reads_back_from_its_repr():
    case = replace(CASE, seed=3, sinks=True, cache_dtype=torch.float8_e4m3fn, poison="inf")
    assert eval(repr(case)) == case
    for a, b in zip(case.build()[0], case.build()[0], strict=True):
        assert same_bytes(a, b)
    assert not same_bytes(case.build()[0][0], replace(case, seed=4).build()[0][0])


@pytest.mark.parametrize("layout", ["interleaved", "fused", "sliced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_poison_fills_the_whole_pool_but_for_keys_that_are_seen(layout, dtype):
    case = replace(CASE, cache_dtype=dtype, pool_layout=layout, dtype=torch.float32)
    args, options = case.build()
    poison("paged_attention", args, options | {"window_size": (3, 0)})
    for cache in args[1:3]:
        alive = cache.float().isfinite()
        assert int(alive.all(-1).all(-1).sum()) == 6 + 4  # seen keys of 9 and of 21
        assert int(alive.sum()) == 10 * 2 * 64
        base = cache.untyped_storage()
        pool = torch.empty(0, dtype=dtype).set_(base).float()
        assert int(pool.isfinite().sum()) == 10 * 2 * 64 * (1 if layout == "sliced" else 2)
    assert args[3].tolist()[1] == [10**6, -1, 10**6, -1]
    assert args[0][6:].isnan().all()


@pytest.mark.parametrize("cases", [varlen_cases, prefix_cases, paged_cases])
def test_strategies_leave_out_what_is_not_asked_for(cases):
    @given(cases(options=()))
    def draws_plain_calls(case):
        plain = Case(case.function, case.k_lens, case.q_lens, case.heads, case.head_dims)
        drawn = ("dtype", "page_size", "option_dtype", "seed")
        assert case == replace(plain, **{name: getattr(case, name) for name in drawn})

    draws_plain_calls()
    with pytest.raises(ValueError, match="'sink'"):
        cases(options={"sink"})


def test_strategies_draw_every_option():
    plain, seen = Case("prefix_attention", ()), set()

    @settings(max_examples=200)
    @given(prefix_cases())
    def draw(case):
        names = (f.name for f in fields(case))
        seen.update(name for name in names if getattr(case, name) != getattr(plain, name))
        seen.update(case.options)

    draw()
    assert seen >= {f.name for f in fields(plain)} - {"function"}
    assert seen >= {
        "softmax_scale", "causal", "window_size", "chunk_size", "softcap", "num_splits",
        "batch_invariant", "return_lse",
    }  # fmt: skip
