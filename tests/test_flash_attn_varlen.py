"""``flash_attn_varlen_func`` and its packed forms, over packed keys, parts of them, and pages."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from flash import EXTRAS, PATTERNS, Batch, extras_of, options_of, pairs
from torch import Tensor

from tritonattn.flash_attn import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    varlen,
)
from tritonattn.testing import block_table, cumulative, generator, kv_pool

fp16, f32, fp8 = torch.float16, torch.float32, torch.float8_e4m3fn


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


def test_flash_attn_varlen_func_takes_packed_float8_keys(device):
    data = Batch([2, 3], [4, 6], (4, 2), (16, 24), fp16, device, causal=True)
    data.factor = 4.0
    k, v = data.k.to(fp8), data.v.to(fp8)
    data.k, data.v = k.to(fp16), v.to(fp16)
    sums = cumulative([2, 3], device), cumulative([4, 6], device)
    data.check(flash_attn_varlen_func(data.q, k, v, *sums, 3, 6, causal=True))


def test_flash_attn_varlen_func_parts_of_sequences_stay_in_their_rows(device):
    """``seqused_q`` below 0 or above a sequence's queries must reach no other sequence's rows."""
    starts = torch.tensor([0, 3, 3, 5], dtype=torch.int32, device=device)
    used = torch.tensor([-7, 1, 99], dtype=torch.int32, device=device)
    split = varlen._split(starts, used, dict.fromkeys(("alibi_slopes", "k_scale", "v_scale")))
    assert split.tolist() == [0, 0, 3, 3, 3, 5, 5]


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
