"""flash-attn's functions without a cache: their signatures, results, arguments and patterns."""

from __future__ import annotations

import doctest
import inspect
import itertools
from typing import Any

import pytest
import torch
from flash import compare, pairs
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
from tritonattn.testing import block_table, cumulative, generator, kv_pool, normal

fp16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
fp8 = torch.float8_e4m3fn

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


# What is compared: packed tensors, lengths, and options by the package's names


class Batch:
    """Packed tensors of sequences, and what attention over them must give."""

    def __init__(self, q_lens, k_lens, heads, dims, dtype, device, seed=0, **options):
        how: dict[str, Any] = {"generator": generator(seed), "dtype": dtype, "device": device}
        (hq, hkv), (dim, dim_v) = heads, dims
        self.q = normal(sum(q_lens), hq, dim, **how)
        self.k = normal(sum(k_lens), hkv, dim, **how)
        self.v = normal(sum(k_lens), hkv, dim_v, **how)
        self.q_lens, self.k_lens, self.device = q_lens, k_lens, device
        self.options = options
        self.factor = 3.0 if options.get("softcap") else 2.0

    def check(self, result: Any) -> None:
        sums = cumulative(self.q_lens, self.device), cumulative(self.k_lens, self.device)
        oracle, fair = (
            reference.varlen_attention(
                self.q, self.k, self.v, *sums, **self.options, return_lse=True, compute_dtype=t
            )
            for t in (f64, self.q.dtype)
        )
        compare(result, self.q, oracle, fair, self.factor)


def slopes(heads: int, batch: int, rank: int, device: torch.device) -> Tensor | None:
    if rank == 0:
        return None
    values = 2.0 ** -torch.arange(1, batch * heads + 1, device=device).view(batch, heads)
    return values if rank == 2 else values[0]


def packed(result: tuple[Tensor, Tensor, Tensor], batch: int, seqlen: int) -> tuple[Tensor, Tensor]:
    """A dense result as a packed one; the shapes are flash-attn's."""
    out, lse, s_dmask = result
    assert out.shape[:2] == (batch, seqlen)
    assert lse.shape == (batch, out.shape[2], seqlen)
    assert lse.is_contiguous()
    assert s_dmask.numel() == 0
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


# The axes of flash-attn's own tests of these functions.
PATTERNS = pairs(
    {
        "lengths": ((1, 1), (3, 9), (9, 3), (5, 5), (1, 12)),
        "masked": ("", "causal", "local"),
        "alibi": (0, 1, 2),
        "softcap": (0.0, 5.0),
        "heads": ((2, 2), (4, 2), (3, 1)),
        "dims": ((16, 16), (40, 24), (59, 59)),
        "dtype": (fp16, bf16, f32),
        "deterministic": (False, True),
    }
)


def options_of(row: dict[str, Any], batch: int, device: torch.device) -> dict[str, Any]:
    return {
        "causal": row["masked"] == "causal",
        "window_size": (3, 1) if row["masked"] == "local" else (-1, -1),
        "softcap": row["softcap"],
        "alibi_slopes": slopes(row["heads"][0], batch, row["alibi"], device),
    }


@pytest.mark.parametrize("row", PATTERNS, ids=repr)
def test_flash_attn_func_carries_flash_attns_own_patterns(row, device):
    batch, (lq, lk) = 2, row["lengths"]
    options = options_of(row, batch, device)
    data = Batch([lq] * 2, [lk] * 2, row["heads"], row["dims"], row["dtype"], device, **options)
    q, k, v = (x.unflatten(0, (batch, -1)) for x in (data.q, data.k, data.v))
    flags = {"deterministic": row["deterministic"], "return_attn_probs": True}
    data.check(packed(flash_attn_func(q, k, v, 0.0, **options, **flags), batch, lq))


@pytest.mark.parametrize("row", PATTERNS, ids=repr)
def test_flash_attn_varlen_func_carries_flash_attns_own_patterns(row, device):
    lq, lk = row["lengths"]
    q_lens, k_lens = [lq, 0, 2], [lk, 4, 0]
    options = options_of(row, 3, device)
    data = Batch(q_lens, k_lens, row["heads"], row["dims"], row["dtype"], device, **options)
    sums = cumulative(q_lens, device), cumulative(k_lens, device)
    flags = {"deterministic": row["deterministic"], "return_attn_probs": True}
    bounds = max(q_lens), max(k_lens)
    out, lse, s_dmask = flash_attn_varlen_func(
        data.q, data.k, data.v, *sums, *bounds, 0.0, **options, **flags
    )
    assert s_dmask.numel() == 0
    data.check((out, lse))


EXTRAS: list[dict[str, Any]] = [
    {"s_aux": True}, {"sinks": True}, {"attention_chunk": 3}, {"num_splits": 2},
    {"softmax_scale": 0.3},
]  # fmt: skip


def extras_of(extra: dict[str, Any], device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments, and the oracle's options."""
    given = dict(extra)
    for name in {"s_aux", "sinks"} & set(given):
        given[name] = normal(2, dtype=f32, generator=generator(3), device=device)
    names = {"s_aux": "sinks", "attention_chunk": "chunk_size"}
    return given, {names.get(n, n): x for n, x in given.items()}


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


@pytest.mark.parametrize("extra", EXTRAS, ids=repr)
def test_flash_attn_varlen_forms_agree(extra, device):
    lens = [4, 0, 3]
    given, options = extras_of(extra, device)
    data = Batch(lens, lens, (2, 2), (16, 16), fp16, device, causal=True, **options)
    given |= {"causal": True, "return_attn_probs": True}
    starts = cumulative(lens, device)
    sums = starts, starts, 4, 4
    kv, qkv = torch.stack([data.k, data.v], 1), torch.stack([data.q, data.k, data.v], 1)
    for result in (
        flash_attn_varlen_func(data.q, data.k, data.v, *sums, **given),
        flash_attn_varlen_kvpacked_func(data.q, kv, *sums, **given),
        flash_attn_varlen_qkvpacked_func(qkv, starts, 4, **given),
    ):
        assert result[2].numel() == 0
        data.check(result[:2])


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


# Varlen over parts of packed keys and over pages


def used(full: list[int], given: list[int] | None) -> list[int]:
    return full if given is None else [max(0, min(n, m)) for n, m in zip(full, given, strict=True)]


def rows_of(x: Tensor, full: list[int], kept: list[int]) -> Tensor:
    """The first ``kept`` rows of each sequence."""
    edges = [0, *itertools.accumulate(full)]
    return torch.cat([x[a : a + n] for a, n in zip(edges, kept, strict=False)])


VARLEN = pairs(
    {
        "page_size": (None, 1, 4),
        "seqused_q": (None, [2, 0, 1], [9, -1, 2]),
        "seqused_k": (None, [6, 1, 0], [3, 99, 2]),
        "alibi": (0, 1, 2),
        "descale": ("", "[Hkv]", "[B, Hkv]"),
        "masked": ("causal", "", "local"),
        "cu_seqlens_k": (True, False),
        "dtype": (fp16, fp8),
    }
)


@pytest.mark.parametrize("row", VARLEN, ids=repr)
def test_flash_attn_varlen_func_uses_what_lengths_and_pages_say(row, device):
    q_lens, k_lens, heads = [3, 0, 2], [7, 2, 5], (4, 2)
    kept_q, kept_k = used(q_lens, row["seqused_q"]), used(k_lens, row["seqused_k"])
    options = options_of({**row, "softcap": 0.0, "heads": heads}, 3, device)
    data = Batch(q_lens, k_lens, heads, (16, 16), fp16, device)
    data.k, data.v = (x.to(row["dtype"]).to(fp16) for x in (data.k, data.v))
    given: dict[str, Any] = {}
    for name in ("seqused_q", "seqused_k"):
        if row[name] is not None:
            given[name] = torch.tensor(row[name], dtype=torch.int32, device=device)
    if row["descale"]:
        shape = (2,) if row["descale"] == "[Hkv]" else (3, 2)
        for i, name in enumerate(("k_descale", "v_descale")):
            given[name] = torch.rand(shape, generator=generator(i)).to(device) + 0.5
    sums = [cumulative(q_lens, device), cumulative(k_lens, device)]
    k, v = data.k, data.v
    if row["page_size"]:
        how: dict[str, Any] = {"generator": generator(5), "device": device}
        table, pages = block_table(tuple(k_lens), row["page_size"], **how)
        k, v = kv_pool(pages, row["page_size"], 2, 16, 16, dtype=fp16, **how)
        edges = [0, *itertools.accumulate(k_lens)]
        for b, n in enumerate(k_lens):
            for j in range(n):
                place = int(table[b, j // row["page_size"]]), j % row["page_size"]
                k[place], v[place] = data.k[edges[b] + j], data.v[edges[b] + j]
        given["block_table"] = table
        if row["seqused_k"] is not None and not row["cu_seqlens_k"]:
            given["seqused_k"] = torch.tensor(kept_k, dtype=torch.int32, device=device)
            sums[1] = None  # nothing else says how many keys there are
    flags = {**options, **given, "return_attn_probs": True}
    k, v = k.to(row["dtype"]), v.to(row["dtype"])
    out, lse, _ = flash_attn_varlen_func(data.q, k, v, *sums, 3, 7, **flags)

    left = [n - m for n, m in zip(q_lens, kept_q, strict=True)]
    tails = [range(a + m, a + m + n) for a, m, n in zip([0, 3, 3], kept_q, left, strict=True)]
    unused = [i for tail in tails for i in tail]
    assert (out[unused] == 0).all()
    assert lse[:, unused].isneginf().all()
    kept = Batch(kept_q, kept_k, heads, (16, 16), fp16, device, **options)
    kept.factor = 4.0 if row["dtype"] == fp8 else 2.0
    kept.options |= {"k_scale": given.get("k_descale"), "v_scale": given.get("v_descale")}
    kept.q = rows_of(data.q, q_lens, kept_q)
    kept.k, kept.v = rows_of(data.k, k_lens, kept_k), rows_of(data.v, k_lens, kept_k)
    kept.check((rows_of(out, q_lens, kept_q), rows_of(lse.T, q_lens, kept_q).T))


@pytest.mark.parametrize("bounds", [(None, None), (100, 7), "tensors"], ids=repr)
def test_flash_attn_varlen_func_bounds_change_nothing(bounds, device):
    """A tensor as a bound is not read, which would wait for the device."""
    lens = [3, 4]
    data = Batch(lens, lens, (2, 1), (16, 16), f32, device, causal=True)
    starts = cumulative(lens, device)
    if bounds == "tensors":
        bounds = (starts.diff().max(), starts.diff().max())
    data.check(flash_attn_varlen_func(data.q, data.k, data.v, starts, starts, *bounds, causal=True))


def test_flash_attn_varlen_func_writes_zero_past_the_last_sequence(device):
    """A captured graph's padding rows."""
    data = Batch([5], [5], (2, 1), (16, 16), f32, device, causal=True)
    starts = cumulative([3], device)
    out, lse, _ = flash_attn_varlen_func(
        data.q, data.k, data.v, starts, starts, 3, 3, causal=True, return_attn_probs=True
    )
    assert (out[3:] == 0).all()
    assert lse[:, 3:].isneginf().all()
    assert out[:3].abs().sum() > 0
