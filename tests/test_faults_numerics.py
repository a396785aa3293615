"""Scores and the softmax: numbers that other attention kernels got wrong."""

from __future__ import annotations

import math

import pytest
import torch
from faults import (
    FUNCTIONS,
    PATHS,
    PREFIX,
    Path,
    arrange,
    assert_result,
    case,
    check,
    every_path,
    half,
    rows,
)

import tritonattn

FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
ONE = {"softmax_scale": 1.0}


def softmax(logits):
    """Weights and lse in double precision."""
    top = max(logits)
    exps = [math.exp(s - top) for s in logits]
    return [e / sum(exps) for e in exps], top + math.log(sum(exps))


def expected(logits, values):
    weights, lse = softmax(logits)
    return sum(p * v for p, v in zip(weights, values, strict=True)), lse


# Softcap


@every_path
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_attention_softcap_of_huge_logits_is_finite(path, sign, device):
    """vllm 56578: tanh as a quotient of two exponentials is inf/inf."""
    made = rows([8192.0 * sign, -8192.0 * sign], [1.0, 2.0])
    args, options = arrange(path, *made, device, softcap=30.0, **ONE)
    assert_result(path, args, options, 1.0 if sign > 0 else 2.0, 30.0)


@every_path
def test_attention_softcap_comes_before_the_bias(path, device):
    """The cap bends the scaled logits alone: neither ALiBi's bias nor the sink."""
    slopes, sinks = torch.tensor([1.0], device=device), torch.tensor([5.0], device=device)
    values = [1.0, 2.0, 4.0]
    how = {"softcap": 2.0, "alibi_slopes": slopes, **ONE}
    args, options = arrange(path, *rows([50.0, 50.0, 50.0], values), device, **how)
    assert_result(path, args, options, *expected([0.0, 1.0, 2.0], values))
    with_sink = expected([0.0, 1.0, 2.0, 5.0], [*values, 0.0])
    assert_result(path, args, options | {"sinks": sinks}, *with_sink)


# Great and small logits


@every_path
@pytest.mark.parametrize(
    ("q", "k", "dim", "logit"),
    [
        (1.0, -60000.0, 1, -60000.0),
        (480.0, -512.0, 1, -245760.0),
        (64.0, -64.0, 128, -524288.0),
        (1.0, -200.0, 1, -200.0),
    ],
)
def test_attention_of_equal_low_logits_is_the_mean(path, q, k, dim, logit, device):
    """FlashInfer 4267, 4450: all true scores are below a finite "minus infinity"."""
    shape = max(16, dim)
    queries, keys = torch.zeros(1, 1, shape, dtype=FP16), torch.zeros(4, 1, shape, dtype=FP16)
    queries[..., :dim], keys[..., :dim] = q, k
    values = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=FP16).view(4, 1, 1)
    args, options = arrange(path, queries, keys, values, device, **ONE)
    assert_result(path, args, options, 3.0, logit + math.log(4))


@every_path
@pytest.mark.parametrize("lq", [1, 2, 4])
@pytest.mark.parametrize("logit", [200.0, -200.0])
def test_attention_of_equal_high_logits_is_uniform(path, lq, logit, device):
    """executorch PR 22133: exponents shifted by a constant overflow at +200, or vanish at -200."""
    n = 20
    values = torch.eye(n)
    args, options = arrange(path, *rows([logit] * n, values, lq=lq), device, causal=False, **ONE)
    assert_result(path, args, options, 1 / n, logit + math.log(n))


@every_path
def test_attention_of_logits_that_grow_along_the_keys_is_the_last_one(path, device):
    """Each tile raises the running maximum by more than float32's exponents reach."""
    n = 40
    made = rows([100.0 * (j - 20) for j in range(n)], [float(j) for j in range(n)])
    args, options = arrange(path, *made, device, **ONE)
    assert_result(path, args, options, n - 1.0, 1900.0)
    made = rows([-100.0 * (j - 20) for j in range(n)], [float(j + 1) for j in range(n)])
    args, options = arrange(path, *made, device, **ONE)
    assert_result(path, args, options, 1.0, 2000.0)


@every_path
def test_attention_of_huge_bfloat16_is_finite(path, device):
    """pytorch 121558: q = k = v = 133120, one key: the value itself."""
    x = torch.full((1, 1, 64), 133120.0, dtype=BF16)
    args, options = arrange(path, x, x, x, device)
    out, lse = path(*args, **options, return_lse=True)
    assert (out == 133120.0).all()
    assert lse.isfinite().all()


@every_path
@pytest.mark.parametrize("best", [3, 150, 299])
def test_attention_of_huge_scores_takes_the_largest(path, best, device):
    """Its kind: many keys, whose scores float32 does not tell from one another but for one."""
    q = torch.full((1, 1, 64), 133120.0, dtype=BF16)
    k = torch.full((300, 1, 64), 133120.0, dtype=BF16)
    v = torch.randn(300, 1, 64, generator=torch.Generator().manual_seed(0)).to(BF16)
    args, options = arrange(path, q, k, torch.full_like(v, 3.0), device)
    out, lse = path(*args, **options, return_lse=True)
    assert (out == 3.0).all()
    assert lse.isfinite().all()
    k[best] = 134144.0
    args, options = arrange(path, q, k, v, device)
    out, lse = path(*args, **options, return_lse=True)
    assert torch.equal(out[0].cpu(), v[best])
    assert lse.isfinite().all()


@every_path
def test_attention_to_one_key_gives_its_value_to_the_last_bit(path, device):
    """A weight is exactly 1 there, however the score was rounded."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(40, 1, 64, generator=gen).to(torch.float16) for _ in range(3))
    args, options = arrange(path, q, k, v, device, window_size=(0, 0))
    options["out"] = torch.empty(40, 1, 64, device=device)  # float32, which shows it
    assert torch.equal(path(*args, **options).cpu(), v.float())


@every_path
def test_attention_of_float32_is_not_computed_in_tf32(path, device):
    """triton 1671: with 10 bits of mantissa 4097 is 4096, and both keys weigh .5."""
    q, k = torch.zeros(1, 1, 16), torch.zeros(2, 1, 16)
    q[..., :2] = torch.tensor([4097.0, 4096.0])
    k[0, 0, :2] = torch.tensor([1.0, -1.0])
    v = torch.tensor([1.0, 0.0]).view(2, 1, 1)
    args, options = arrange(path, q, k, v, device, **ONE)
    options["out"] = half(args, 1)
    assert_result(path, args, options, *expected([1.0, 0.0], [1.0, 0.0]))  # .7311


@every_path
def test_attention_values_of_float32_are_not_rounded_to_tf32(path, device):
    """The second product: values that only more than 10 bits tell apart."""
    made = rows([0.0, 0.0], [4097.0, -4096.0], dtype=FP32)
    args, options = arrange(path, *made, device)
    assert_result(path, args, options, 0.5)


# ALiBi


@every_path
def test_attention_alibi_is_in_natural_units(path, device):
    """segment-anything-fast PR 71: the bias was not multiplied by log2(e)."""
    args, options = arrange(
        path, *rows([0.0, 0.0], torch.eye(2)), device, alibi_slopes=torch.ones(1, device=device)
    )
    p = 1 / (1 + math.e)
    out = torch.tensor([p, 1 - p], dtype=FP64).view(1, 1, 2)  # .2689, .7311
    assert_result(path, args, options, out, softmax([-1.0, 0.0])[1])


@every_path
def test_attention_alibi_of_the_own_token_is_nothing(path, device):
    """vllm PR 945: one off, which the softmax hides where only one key or all are moved."""
    slopes = torch.tensor([0.5], device=device)
    made = rows([0.75], [3.0])
    args, options = arrange(path, *made, device, alibi_slopes=slopes, softmax_scale=0.5)
    assert_result(path, args, options, 3.0, 0.375)


@every_path
def test_attention_alibi_counts_from_each_query(path, device):
    """TransformerEngine 1046: the offset of a chunk behind 20 cached tokens was missing."""
    slopes, lq, lk = torch.tensor([0.5], device=device), 4, 24
    made = rows([0.0] * lk, torch.eye(lk), lq=lq)
    args, options = arrange(path, *made, device, alibi_slopes=slopes)
    out, lse = torch.zeros(lq, 1, lk, dtype=FP64), torch.zeros(1, lq, dtype=FP64)
    for i in range(lq):
        weights, lse[0, i] = softmax([-0.5 * (20 + i - j) for j in range(21 + i)])
        out[i, 0, : 21 + i] = torch.tensor(weights, dtype=FP64)
    assert_result(path, args, options, out, lse)


@every_path
@pytest.mark.parametrize("dtype", [FP16, BF16, FP64], ids=str)
@pytest.mark.parametrize("batched", [False, True])
def test_attention_alibi_slopes_are_used_as_float32(path, dtype, batched, device):
    """flash-attention 845: slopes in the model's dtype were refused, or read as float32 bits."""
    how = {"heads": (2, 1), "head_dims": (16, 16)}
    args, options = case(path, (30,), (2,), **how).build(device)
    slopes = torch.tensor([[0.7, 0.3]] if batched else [0.7, 0.3], device=device).to(dtype)
    out = path(*args, **options, alibi_slopes=slopes)
    assert torch.equal(out, path(*args, **options, alibi_slopes=slopes.float()))
    if dtype == BF16:
        check(path, args, options | {"alibi_slopes": slopes})


@every_path
def test_attention_alibi_slopes_are_those_that_are_passed(path, device):
    """FlashInfer PR 5101: slopes made anew from the local number of heads; 4 to 7 of 8 here."""
    slopes = tritonattn.alibi_slopes(8, device=device)[4:]
    assert slopes.tolist() == [2.0**-5, 2.0**-6, 2.0**-7, 2.0**-8]
    made = rows([0.0] * 4, torch.eye(4), heads=4)
    args, options = arrange(path, *made, device, alibi_slopes=slopes)
    out, lse = torch.zeros(1, 4, 4, dtype=FP64), torch.zeros(4, 1, dtype=FP64)
    for h in range(4):
        weights, lse[h, 0] = softmax([-(2.0 ** -(5 + h)) * (3 - j) for j in range(4)])
        out[0, h] = torch.tensor(weights)
    assert_result(path, args, options, out, lse)


@every_path
def test_attention_alibi_keeps_far_distances_apart(path, device):
    """transformers PR 17474: a bias in bfloat16 loses them; here keys undo the bias exactly."""
    slope = 2.0**-0.5
    made = rows([slope * (63 - j) for j in range(64)], torch.eye(64), dtype=FP32)
    slopes = torch.tensor([slope], device=device)
    args, options = arrange(path, *made, device, alibi_slopes=slopes, **ONE)
    assert_result(path, args, options | {"out": half(args, 64)}, 1 / 64, math.log(64))


# Sinks


@pytest.mark.parametrize("path", [*PATHS, *(Path(f, 8, True) for f in FUNCTIONS)], ids=str)
def test_attention_sink_is_neither_scaled_nor_capped_and_counts_once(path, device):
    """rocm-libraries PR 12229: scaled, capped, counted in every split, or lost with the keys."""
    how = {"softmax_scale": 0.125, "softcap": 1.0, "sinks": torch.tensor([1.5], device=device)}
    total = 4 + math.exp(1.5)
    args, options = arrange(path, *rows([0.0] * 4, torch.eye(4)), device, **how)
    assert_result(path, args, options, 1 / total, math.log(total))  # .1179
    if path.function == PREFIX:
        return  # a query is its own key
    args, options = arrange(path, *rows([], torch.empty(0, 4)), device, **how)
    assert_result(path, args, options, 0.0, 1.5)


@every_path
@pytest.mark.parametrize("dtype", [None, FP16, BF16, FP32, FP64], ids=str)
def test_attention_takes_sinks_of_any_dtype(path, dtype, device):
    """vllm PR 22368: sinks of another dtype than q's did not compile."""
    sinks = None if dtype is None else torch.tensor([0.5, -1.25], device=device, dtype=dtype)
    args, options = arrange(path, *rows([0.0] * 2, [1.0, 1.0], heads=2), device, sinks=sinks)
    totals = [2.0, 2.0] if dtype is None else [2 + math.exp(0.5), 2 + math.exp(-1.25)]
    out = torch.tensor([2 / x for x in totals], dtype=FP64).view(1, 2, 1)
    lse = torch.tensor([math.log(x) for x in totals], dtype=FP64).view(2, 1)
    assert_result(path, args, options, out, lse)


@every_path
@pytest.mark.parametrize("sink", [-math.inf, -1e30, 300.0])
def test_attention_takes_extreme_sinks(path, sink, device):
    """No sink at all, one too small to matter, and one that takes everything."""
    sinks = torch.tensor([sink], device=device)
    args, options = arrange(path, *rows([1.0, 0.0], [1.0, 0.0]), device, sinks=sinks, **ONE)
    out, lse = (0.0, 300.0) if sink > 0 else expected([1.0, 0.0], [1.0, 0.0])
    assert_result(path, args, options, out, lse)


# Scales


@every_path
def test_attention_of_scale_0_is_uniform(path, device):
    made = rows([3.0, -2.0, 90.0, 0.5], torch.eye(4))
    args, options = arrange(path, *made, device, softmax_scale=0.0)
    assert_result(path, args, options, 0.25, math.log(4))
    args, options = arrange(path, *made, device, softmax_scale=1.0)
    options["query_scale"] = torch.zeros(1, device=device)
    assert_result(path, args, options, 0.25, math.log(4))


@every_path
def test_attention_of_a_negative_scale_is_that_of_negative_queries(path, device):
    """A maximum taken before the scale is the wrong end."""
    made = rows([3.0, -2.0, 1.0, -8.0], [1.0, 2.0, 4.0, 8.0])
    args, options = arrange(path, *made, device, softmax_scale=-1.0)
    assert_result(path, args, options, *expected([-3.0, 2.0, -1.0, 8.0], [1.0, 2.0, 4.0, 8.0]))
    how = {"heads": (2, 1), "head_dims": (16, 16), "poison": "nan"}
    args, options = case(path, (30,), (2,), **how).build(device)
    out = path(*args, **options, softmax_scale=-1.0)
    if not path.on_hopper:  # whose kernel leaves negative scales to the other, which rounds alike
        assert torch.equal(out, path(-args[0], *args[1:], **options, softmax_scale=1.0))
    check(path, args, options | {"softmax_scale": -1.0})


@every_path
def test_attention_scales_are_not_folded_past_the_cap(path, device):
    """query_scale and k_scale multiply the logits that the cap bends, not the capped ones."""
    q, k, v = rows([0.5, -1.0], [1.0, 2.0])
    how = {"softcap": 2.0, "query_scale": torch.tensor([3.0], device=device), **ONE}
    args, options = arrange(path, q, k, v, device, **how)
    logits = [2 * math.tanh(0.75), 2 * math.tanh(-1.5)]
    assert_result(path, args, options, *expected(logits, [1.0, 2.0]))
