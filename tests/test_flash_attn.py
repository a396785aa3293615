"""The signatures of flash-attn's functions; ``flash_attn_func`` and its packed forms."""

from __future__ import annotations

import doctest
import inspect
from typing import Any

import pytest
import torch
from flash import EXTRAS, PATTERNS, Batch, compare, extras_of, options_of
from torch import Tensor

from tritonattn import flash_attn, reference
from tritonattn.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from tritonattn.testing import cumulative, generator, normal

fp16, f64, fp8 = torch.float16, torch.float64, torch.float8_e4m3fn

# flash-attn 2's parameters, in order; a name alone has no default.
_OPTIONS: list[Any] = [
    ("dropout_p", 0.0), ("softmax_scale", None), ("causal", False), ("window_size", (-1, -1)),
    ("softcap", 0.0), ("alibi_slopes", None), ("deterministic", False),
    ("return_attn_probs", False),
]  # fmt: skip
_PACKED = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
SIGNATURES: dict[Any, list[Any]] = {
    flash_attn_func: ["q", "k", "v", *_OPTIONS],
    flash_attn_kvpacked_func: ["q", "kv", *_OPTIONS],
    flash_attn_qkvpacked_func: ["qkv", *_OPTIONS],
    flash_attn_varlen_func: ["q", "k", "v", *_PACKED, *_OPTIONS, ("block_table", None)],
    flash_attn_varlen_kvpacked_func: ["q", "kv", *_PACKED, *_OPTIONS],
    flash_attn_varlen_qkvpacked_func: ["qkv", "cu_seqlens", "max_seqlen", *_OPTIONS],
    flash_attn_with_kvcache: [
        "q", "k_cache", "v_cache", ("k", None), ("v", None), ("rotary_cos", None),
        ("rotary_sin", None), ("cache_seqlens", None), ("cache_batch_idx", None),
        ("cache_leftpad", None), ("block_table", None), ("softmax_scale", None), ("causal", False),
        ("window_size", (-1, -1)), ("softcap", 0.0), ("rotary_interleaved", True),
        ("alibi_slopes", None), ("num_splits", 0), ("return_softmax_lse", False),
    ],
}  # fmt: skip
named = pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)


@named
def test_flash_attn_has_flash_attns_signature(function):
    parameters = list(inspect.signature(function).parameters.values())
    wanted = [
        (x, inspect.Parameter.empty) if isinstance(x, str) else x for x in SIGNATURES[function]
    ]
    theirs = [p for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in theirs] == wanted
    ours = parameters[len(theirs) :]
    assert all(p.kind == p.KEYWORD_ONLY and p.default in (None, 0) for p in ours)


def test_flash_attn_exports_exactly_these_functions():
    assert set(flash_attn.__all__) == {f.__name__ for f in SIGNATURES}


@pytest.mark.parametrize("name", ["dense", "varlen", "kvcache"])
def test_flash_attn_docstring_examples_run(name):
    module = getattr(flash_attn, name)
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def packed(result: tuple[Tensor, Tensor, Tensor], batch: int, seqlen: int) -> tuple[Tensor, Tensor]:
    """A dense result as a packed one; the shapes are flash-attn's."""
    out, lse, s_dmask = result
    assert out.shape[:2] == (batch, seqlen)
    assert lse.shape == (batch, out.shape[2], seqlen)
    assert lse.is_contiguous()
    assert s_dmask.numel() == 0
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("row", PATTERNS, ids=repr)
def test_flash_attn_func_carries_flash_attns_own_patterns(row, device):
    batch, (lq, lk) = 2, row["lengths"]
    options = options_of(row, batch, device)
    data = Batch([lq] * 2, [lk] * 2, row["heads"], row["dims"], row["dtype"], device, **options)
    q, k, v = (x.unflatten(0, (batch, -1)) for x in (data.q, data.k, data.v))
    flags = {"deterministic": row["deterministic"], "return_attn_probs": True}
    data.check(packed(flash_attn_func(q, k, v, 0.0, **options, **flags), batch, lq))


@pytest.mark.parametrize("extra", EXTRAS, ids=repr)
def test_flash_attn_dense_forms_agree(extra, device):
    """The packed forms and the plain one, each with every further option."""
    batch, seqlen, heads = 2, 5, (2, 2)
    given, options = extras_of(extra, device)
    lens = [seqlen] * batch
    data = Batch(lens, lens, heads, (16, 16), fp16, device, causal=True, **options)
    q, k, v = (x.unflatten(0, (batch, seqlen)) for x in (data.q, data.k, data.v))
    given |= {"causal": True, "return_attn_probs": True}
    data.check(packed(flash_attn_func(q, k, v, **given), batch, seqlen))
    kv, qkv = torch.stack([k, v], 2), torch.stack([q, k, v], 2)
    data.check(packed(flash_attn_kvpacked_func(q, kv, **given), batch, seqlen))
    data.check(packed(flash_attn_qkvpacked_func(qkv, **given), batch, seqlen))


@pytest.mark.parametrize("layout", ["packed", "head_major", "last_axis", "expanded"])
def test_flash_attn_func_takes_any_strides(layout, device):
    """As the models of transformers have them: [B, H, L, D] seen as [B, L, H, D]."""
    data = Batch([3, 3], [6, 6], (4, 2), (16, 16), fp16, device, causal=True)
    q, k, v = (x.unflatten(0, (2, -1)) for x in (data.q, data.k, data.v))
    if layout == "head_major":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    if layout == "last_axis":
        q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v))
    if layout == "expanded":  # one prompt for all
        k, v = (x[:1].expand(2, -1, -1, -1) for x in (k, v))
        data.k, data.v = k.flatten(0, 1), v.flatten(0, 1)
    data.check(packed(flash_attn_func(q, k, v, causal=True, return_attn_probs=True), 2, 3))


@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=repr)
def test_flash_attn_func_takes_empty_axes(sizes, device):
    batch, lq, lk = sizes
    q = normal(batch, lq, 2, 16, dtype=fp16, generator=generator(0), device=device)
    k, v = normal(2, batch, lk, 2, 16, dtype=fp16, generator=generator(1), device=device)
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert lse.isneginf().all()


@pytest.mark.parametrize("shape", [(), (2,), (2, 2)], ids=repr)
@pytest.mark.parametrize("cache_dtype", [fp16, fp8], ids=str)
def test_flash_attn_func_multiplies_by_descales(cache_dtype, shape, device):
    """Those of queries and keys scale the scores; keys and values may be float8."""
    batch, lq, lk, heads = 2, 3, 5, (4, 2)
    data = Batch([lq] * batch, [lk] * batch, heads, (16, 16), fp16, device)
    scales = [torch.rand(shape, generator=generator(i)).to(device) + 0.5 for i in range(3)]
    names = ("q_descale", "k_descale", "v_descale")
    k, v = (reference.quantise(x, cache_dtype) for x in (data.k, data.v))
    given = dict(zip(names, scales, strict=True))
    out, lse, _ = flash_attn_func(
        data.q.view(batch, lq, 4, 16),
        k.view(batch, lk, 2, 16),
        v.view(batch, lk, 2, 16),
        **given,
        return_attn_probs=True,
    )
    wide = [s.expand(batch, 2) for s in scales]
    q_scale = wide[0].repeat_interleave(2, 1).repeat_interleave(lq, 0)[..., None]
    k_scale, v_scale = (s.repeat_interleave(lk, 0)[..., None] for s in wide[1:])
    sums = cumulative([lq] * batch, device), cumulative([lk] * batch, device)
    oracle, fair = (
        reference.varlen_attention(
            (data.q.to(f64) * q_scale).to(t),
            (k.to(f64) * k_scale).to(t),
            (v.to(f64) * v_scale).to(t),
            *sums, causal=False, return_lse=True, compute_dtype=t,
        )
        for t in (f64, fp16)
    )  # fmt: skip
    result = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    compare(result, data.q, oracle, fair, 4.0 if cache_dtype == fp8 else 2.0)
