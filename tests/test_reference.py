"""The oracle itself, against values worked out by hand, plain loops and torch's own attention."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonattn import reference
from tritonattn.reference import (
    merge_states,
    paged_attention,
    prefix_attention,
    varlen_attention,
    visible,
)
from tritonattn.strategies import OPTIONS, paged_cases, prefix_cases, varlen_cases
from tritonattn.testing import POOL_LAYOUTS, Case, cumulative, generator, same_bytes


def attend(logits, values, **options):
    """One query whose product with key j is ``logits[j]``: out [Dv] and lse."""
    k = torch.tensor(logits, dtype=torch.float32).reshape(-1, 1, 1)
    v = torch.tensor(values, dtype=torch.float32).reshape(len(logits), 1, -1)
    options = {"softmax_scale": 1.0, "return_lse": True} | options
    cu_q, cu_k = cumulative([1]), cumulative([len(logits)])
    out, lse = varlen_attention(torch.ones(1, 1, 1), k, v, cu_q, cu_k, **options)
    return out[0, 0].tolist(), float(lse)


def probed(function, k_lens, q_lens, *, heads=(1, 1), dtype=torch.float32, **options):
    """All weights equal and values unit vectors: ``out[i, h, j] != 0`` where row i sees key j."""
    case = Case(function, k_lens, q_lens, heads, (8, 64), dtype, probe=True, poison="nan")
    args, built = replace(case, options=options).build()
    return getattr(reference, function)(*args, **built, return_lse=True)


# Masks


@pytest.mark.parametrize(
    ("lk", "lq", "options", "rows"),
    [
        (8, 4, {"window_size": (5, 0)}, "11111000 11111100 01111110 00111111"),
        (5, 3, {"window_size": (1, 0)}, "01100 00110 00011"),
        (8, 1, {"window_size": (5, 0)}, "00111111"),
        (6, 4, {"chunk_size": 4}, "111000 111100 000010 000011"),
        (5, 1, {"chunk_size": 4}, "00001"),
        (3, 5, {}, "000 000 100 110 111"),
        (5, 2, {}, "11110 11111"),
        (4, 4, {"causal": False, "window_size": (0, 0)}, "1000 0100 0010 0001"),
        (2, 4, {"causal": False, "window_size": (0, 0)}, "00 00 10 01"),
        (3, 3, {"causal": False, "window_size": (-1, 0)}, "100 110 111"),
        (3, 3, {"causal": False, "window_size": (None, 1)}, "110 111 111"),
        (2, 5, {"causal": False, "window_size": (0, 100)}, "11 11 11 11 01"),
        (3, 5, {"causal": False, "chunk_size": 4}, "000 000 111 111 111"),
    ],
)
def test_visible_is_the_worked_mask(lk, lq, options, rows):
    mask = visible(lq, lk, **options)
    assert ["".join(str(int(x)) for x in row) for row in mask] == rows.split()


def test_visible_takes_a_tree_mask_in_place_of_the_causal_rule():
    tree = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 1], [1, 0, 1, 1]], dtype=torch.bool)
    expected = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]], dtype=torch.bool)
    assert torch.equal(visible(3, 5, tree_mask=tree), expected)
    assert torch.equal(visible(3, 2, tree_mask=tree), tree[:, 1:3])  # fewer keys than queries


@pytest.mark.parametrize("function", ["varlen_attention", "prefix_attention", "paged_attention"])
def test_attention_weights_show_the_mask(function):
    cached = 20 if function == "prefix_attention" else 24
    out, lse = probed(function, (cached,), (4,), window_size=(5, 0))
    for i, row in enumerate(out[:, 0]):
        expected = torch.zeros(64, dtype=torch.float64)
        expected[15 + i : 21 + i] = 1 / 6
        torch.testing.assert_close(row, expected)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(6)))


# Numbers worked out by hand


def test_attention_is_the_softmax_over_keys():
    out, lse = attend([0.0] * 8, [1.0] * 8)
    assert [*out, lse] == pytest.approx([1.0, math.log(8)])
    assert attend([1.0, 0.0], [1.0, 0.0])[0] == pytest.approx([0.731059], abs=1e-6)


def test_alibi_is_the_distance_to_the_query():
    slope = torch.tensor([1.0])
    out, _ = attend([0.0, 0.0], [[1, 0], [0, 1]], alibi_slopes=slope)
    assert out == pytest.approx([0.2689, 0.7311], abs=1e-4)
    assert attend([0.75], [1.0], alibi_slopes=slope)[1] == pytest.approx(0.75)  # distance 0


def test_alibi_counts_cached_tokens():
    slope = torch.tensor([0.5])
    out, _ = probed("prefix_attention", (20,), (4,), alibi_slopes=slope)
    for i in range(4):
        expected = torch.softmax(torch.tensor([-0.5 * (20 + i - j) for j in range(21 + i)]), 0)
        torch.testing.assert_close(out[i, 0, : 21 + i].float(), expected)


def test_alibi_reaches_keys_after_the_query():
    out, _ = probed("varlen_attention", (3,), (3,), alibi_slopes=torch.ones(1), causal=False)
    expected = torch.softmax(-torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64), 0)
    torch.testing.assert_close(out[0, 0, :3], expected)


def test_alibi_slopes_differ_by_sequence():
    slopes = torch.tensor([[1.0], [0.0]])
    out, _ = probed("paged_attention", (2, 2), None, alibi_slopes=slopes)
    assert out[:, 0, 0].tolist() == pytest.approx([0.2689, 0.5], abs=1e-4)


def test_softcap_is_finite_for_huge_logits_and_applied_before_the_mask():
    assert attend([8192.0, -8192.0], [1.0, 2.0], softcap=30.0)[0] == pytest.approx([1.0])
    out, _ = probed("varlen_attention", (4,), (4,), softcap=1.0)
    assert out[0, 0, :4].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_sinks_are_neither_scaled_nor_capped():
    options = {"softmax_scale": 0.125, "softcap": 1.0, "sinks": torch.tensor([1.5])}
    out, lse = attend([0.0] * 4, torch.eye(4).tolist(), **options)
    assert out == pytest.approx([0.1179] * 4, abs=1e-4)
    assert lse == pytest.approx(math.log(4 + math.exp(1.5)))


def test_query_scale_multiplies_logits_before_the_cap():
    scale = torch.tensor([3.0])
    out, lse = attend([0.5, -1.0], [1.0, 2.0], query_scale=scale, softcap=2.0)
    expected, expected_lse = attend([1.5, -3.0], [1.0, 2.0], softcap=2.0)
    assert [*out, lse] == pytest.approx([*expected, expected_lse])


def test_softmax_scale_may_be_zero_or_negative():
    assert attend([3.0, -2.0], [1.0, 2.0], softmax_scale=0.0)[0] == pytest.approx([1.5])
    out, lse = attend([3.0, -2.0], [1.0, 2.0], softmax_scale=-1.0)
    expected, expected_lse = attend([-3.0, 2.0], [1.0, 2.0])
    assert [*out, lse] == pytest.approx([*expected, expected_lse])


@pytest.mark.parametrize("logit", [-60000.0, -245760.0, 200.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_attention_has_no_finite_minus_infinity(logit, dtype):
    out, lse = attend([logit] * 4, [1.0, 2.0, 3.0, 4.0], compute_dtype=dtype)
    assert out == pytest.approx([2.5])
    assert lse == pytest.approx(logit + math.log(4), rel=1e-7)


def fp8_decode(**scales):
    k = torch.tensor([2.0, -2.0]).reshape(1, 2, 1, 1).to(torch.float8_e4m3fn)
    v = torch.tensor([1.0, 3.0]).reshape(1, 2, 1, 1).to(torch.float8_e4m3fn)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    out = paged_attention(torch.ones(1, 1, 1), k, v, table, lens, softmax_scale=1.0, **scales)
    return float(out)


def test_scales_multiply_stored_keys_and_values():
    assert fp8_decode(k_scale=0.5, v_scale=2.0) == pytest.approx(2.4768, abs=1e-4)
    assert fp8_decode() == pytest.approx(fp8_decode(k_scale=1.0, v_scale=1.0))
    tensors = {"k_scale": torch.tensor([[0.5]]), "v_scale": torch.tensor(2.0)}
    assert fp8_decode(**tensors) == pytest.approx(2.4768, abs=1e-4)


def test_scales_belong_to_kv_heads_and_to_the_cached_part_alone():
    case = Case(
        "prefix_attention", (3, 5), (2, 1), heads=(4, 2), head_dims=(8, 8), kv_scale="[B, Hkv]"
    )
    args, options = replace(case, dtype=torch.float32).build()
    q, k, v, k_cache, v_cache, table, cu_q, lens = args
    scaled = prefix_attention(*args, **options)
    caches = [k_cache.clone(), v_cache.clone()]
    for cache, scale in zip(caches, (options["k_scale"], options["v_scale"]), strict=True):
        for b in range(2):
            cache[table[b, 0]] *= scale[b][:, None]
    plain = prefix_attention(q, k, v, *caches, table, cu_q, lens)
    torch.testing.assert_close(scaled, plain, rtol=1e-6, atol=1e-6)


# Rows and lengths without keys


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5])])
def test_rows_without_keys_are_zero_and_padding_rows_are_empty(sinks):
    q, kv = torch.ones(8, 1, 4), torch.ones(3, 1, 4)
    options = {"sinks": sinks, "return_lse": True}
    out, lse = varlen_attention(q, kv, kv, cumulative([5, 2]), cumulative([3, 0]), **options)
    empty = [0, 1, 5, 6]
    assert (out[[*empty, 7]] == 0).all()
    assert (out[2:5] != 0).all()
    assert lse[0, empty].tolist() == [-math.inf if sinks is None else 0.5] * 4
    assert lse[0, 7] == -math.inf


def test_negative_lengths_count_as_zero():
    args, _ = Case("paged_attention", (-9, 4, -1), (2, 1, 0)).build()
    same, options = Case("paged_attention", (0, 4, 0), (2, 1, 0)).build()
    assert same_bytes(paged_attention(*args, **options), paged_attention(*same, **options))
    prefix, options = Case("prefix_attention", (-9, 4), (2, 1)).build()
    zero = (*prefix[:-1], prefix[-1].clamp(min=0))
    assert same_bytes(prefix_attention(*prefix, **options), prefix_attention(*zero, **options))


def test_attention_of_no_sequences_is_empty():
    args, options = Case("paged_attention", (), ()).build()
    assert paged_attention(*args, **options).shape == (0, 4, 64)


# The same result, said otherwise


def by_loops(case, args, options):
    """The formula in scalars."""
    q, k_cache, v_cache, table, _ = args
    (heads, kv_heads), (dim, dim_v), size = case.heads, case.head_dims, k_cache.shape[1]
    starts = options.get("cu_seqlens_q", cumulative([1] * len(case.k_lens))).tolist()
    out = torch.zeros(len(q), heads, dim_v, dtype=torch.float64)
    lse = torch.full((heads, len(q)), -math.inf, dtype=torch.float64)
    scale = options.get("softmax_scale", dim**-0.5)
    cap = options.get("softcap", 0.0)
    for b, lk in enumerate(case.k_lens):
        lq, lk = starts[b + 1] - starts[b], max(0, lk)
        for i, h in itertools.product(range(lq), range(heads)):
            row, pos, g = starts[b] + i, i + lk - lq, h // (heads // kv_heads)
            total = math.exp(options["sinks"][h]) if case.sinks else 0.0
            for j in range(lk):
                if not sees(case, options, row, pos, j, lk - lq):
                    continue
                place = (table[b, j // size], j % size, g)
                s = float(q[row, h].double() @ k_cache[place].double()) * scale
                s *= head_scale(options, "k_scale", b, g)
                s *= float(options["query_scale"][row]) if case.query_scale else 1.0
                s = cap * math.tanh(s / cap) if cap else s
                if case.alibi:
                    slopes = options["alibi_slopes"].expand(len(case.k_lens), heads)
                    s -= float(slopes[b, h]) * abs(pos - j)
                value = v_cache[place].double() * head_scale(options, "v_scale", b, g)
                out[row, h] += math.exp(s) * value
                total += math.exp(s)
            if total:
                out[row, h] /= total
                lse[h, row] = math.log(total)
    return out, lse


def sees(case, options, row, pos, j, context):
    sides = options.get("window_size") or (-1, -1)
    left, right = (math.inf if side in (None, -1) else side for side in sides)
    chunk = options.get("chunk_size")
    same_chunk = chunk is None or pos // chunk == j // chunk
    if case.tree_mask:
        allowed = j < context or bool(options["tree_mask"][row, j - context])
    else:
        allowed = not options.get("causal", True) or j <= pos
    return allowed and pos - left <= j <= pos + right and same_chunk


def head_scale(options, name, b, g):
    scale = torch.as_tensor(options.get(name, 1.0))
    scale = scale[b] if scale.dim() == 2 else scale.reshape(-1)
    return float(scale[g] if len(scale) > 1 else scale[0])


PLAIN = OPTIONS - {"out", "return_lse", "block_indptr"}


@given(paged_cases(max_len=9, heads=((4, 2),), head_dims=((8, 5),), options=PLAIN))
def test_paged_attention_equals_plain_loops(case):
    args, options = case.build()
    expected = by_loops(case, args, options)
    result = paged_attention(*args, **options, return_lse=True)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


@given(paged_cases(max_len=20, dtypes=(torch.float32,), options=PLAIN - {"kv_scale"}))
def test_paged_attention_equals_varlen_attention_of_gathered_keys(case):
    args, options = case.build()
    q, k_cache, v_cache, table, lens = args
    cu_k = cumulative([max(0, n) for n in case.k_lens])
    packed = {"cu_seqlens_k": cu_k, "total_k": int(cu_k[-1]), "out_dtype": torch.float32}
    k, v = reference.gather_kv_cache(k_cache, v_cache, table, lens, **packed)
    paged = paged_attention(*args, **options, return_lse=True)
    cu_q = options.pop("cu_seqlens_q", cumulative([1] * len(case.k_lens)))
    varlen = varlen_attention(q, k, v, cu_q, cu_k, **options, return_lse=True)
    assert all(same_bytes(a, b) for a, b in zip(paged, varlen, strict=True))


@given(prefix_cases(max_len=20, dtypes=(torch.float32,), options=PLAIN - {"kv_scale", "fp8"}))
def test_prefix_attention_equals_paged_attention_after_a_cache_write(case):
    args, options = case.build()
    q, k, v, k_cache, v_cache, table, cu_q, lens = args
    keys, values, whole = [], [], []
    for b, context in enumerate(lens.clamp(min=0).tolist()):
        new, j = slice(cu_q[b], cu_q[b + 1]), torch.arange(context)
        place = (table[b, j // case.page_size].long(), j % case.page_size)
        keys += [k_cache[place], k[new]]
        values += [v_cache[place], v[new]]
        whole.append(context + new.stop - new.start)
    slots = torch.arange(sum(whole))
    starts = cumulative(whole)[:-1, None]
    pools = [torch.zeros(len(slots) + 20, 1, *x.shape[1:]) for x in (k, v)]
    if whole:
        reference.write_kv_cache(torch.cat(keys), torch.cat(values), *pools, slots)
    pages = starts + torch.arange(max(whole, default=1))
    whole_lens = torch.tensor(whole, dtype=torch.int32)
    paged = paged_attention(q, *pools, pages, whole_lens, cu_seqlens_q=cu_q, **options)
    assert same_bytes(prefix_attention(*args, **options), paged)


@pytest.mark.parametrize("layout", POOL_LAYOUTS[1:])
def test_attention_does_not_depend_on_the_pool_layout(layout):
    case = Case("paged_attention", (9, 21), (3, 2), head_dims=(8, 8), page_size=4, poison="nan")
    (q, k_cache, v_cache, *rest), options = case.build()
    view, _ = replace(case, pool_layout=layout).build()
    view[1].copy_(k_cache)
    view[2].copy_(v_cache)
    expected = paged_attention(q, k_cache, v_cache, *rest, **options)
    assert expected.isfinite().all()
    assert same_bytes(paged_attention(q, view[1], view[2], *rest, **options), expected)


def test_flat_tables_mean_what_padded_ones_do():
    case = Case("paged_attention", (9, 0, 21), (3, 1, 2), page_size=4)
    args, options = case.build()
    flat, flat_options = replace(case, table="flat").build()
    assert flat[3].dim() == 1
    assert same_bytes(paged_attention(*args, **options), paged_attention(*flat, **flat_options))


@pytest.mark.parametrize("lq", [1, 7])
def test_attention_is_torchs_own(lq):
    case = Case("varlen_attention", (12,), (lq,), heads=(6, 2), head_dims=(16, 8))
    (q, k, v, *cu), _ = case.build()
    dense = [x.double().transpose(0, 1) for x in (q, k, v)]
    mask = torch.ones(lq, 12, dtype=torch.bool).tril(12 - lq)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *dense, attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(varlen_attention(q, k, v, *cu), expected.transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_in_the_inputs_dtype_is_near_the_truth(dtype):
    args, _ = Case("varlen_attention", (30, 40), (20, 5), dtype=dtype).build()
    out, lse = varlen_attention(*args, compute_dtype=dtype, return_lse=True)
    truth = varlen_attention(*args)
    assert (out.dtype, lse.dtype, truth.dtype) == (dtype, torch.float32, torch.float64)
    error = float((out - truth).abs().max())
    assert 0 < error < 8 * torch.finfo(dtype).eps


def test_out_is_written_and_returned():
    args, _ = Case("varlen_attention", (5,), (3,)).build()
    out = torch.full((3, 4, 64), math.nan, dtype=torch.float16)
    assert varlen_attention(*args, out=out) is out
    assert same_bytes(out, varlen_attention(*args).half())


def test_reference_refuses_unknown_options():
    args, _ = Case("varlen_attention", (5,), (3,)).build()
    with pytest.raises(TypeError, match="softmax_scal"):
        varlen_attention(*args, softmax_scal=1.0)


@pytest.mark.parametrize("poison", ["nan", "inf"])
@pytest.mark.parametrize("cases", [varlen_cases, prefix_cases, paged_cases])
@given(data=st.data())
def test_attention_never_uses_what_no_row_sees(cases, poison, data):
    case = data.draw(cases(max_len=20, options=OPTIONS - {"poison", "return_lse"}))
    function = getattr(reference, case.function)
    args, options = case.build()
    poisoned, poisoned_options = replace(case, poison=poison).build()
    out = function(*args, **options | {"out": None})
    assert same_bytes(out, function(*poisoned, **poisoned_options | {"out": None}))


# States and caches


def test_merge_states_weighs_states_by_their_keys():
    outs = [torch.zeros(1, 1, 2), torch.ones(1, 1, 2)]
    out, lse = merge_states(outs, [torch.tensor([[math.log(n)]]) for n in (12, 4)])
    assert out.tolist() == [[pytest.approx([0.25, 0.25])]]
    assert float(lse) == pytest.approx(math.log(16))


def test_merge_states_of_parts_is_attention_over_the_whole():
    q, k, v, *_ = Case("varlen_attention", (12,), (3,), dtype=torch.float32).build()[0]
    cu_q = cumulative([3])
    parts = [
        varlen_attention(q, k[part], v[part], cu_q, cumulative([n]), causal=False, return_lse=True)
        for part, n in ((slice(5), 5), (slice(5, 6), 1), (slice(6, 12), 6))
    ]
    whole = varlen_attention(q, k, v, cu_q, cumulative([12]), causal=False, return_lse=True)
    merged = merge_states(*zip(*parts, strict=True))
    torch.testing.assert_close(merged, whole)
    for a, b in zip(merge_states(*zip(*parts[:1], strict=True)), parts[0], strict=True):
        assert same_bytes(a, b)


@pytest.mark.parametrize("empties", [1, 2, 3])
def test_merge_states_ignores_empty_states(empties):
    out, lse = torch.randn(2, 3, 4, generator=generator(0)), torch.full((3, 2), 200.0)
    nothing = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    merged, merged_lse = merge_states([nothing[0]] * empties, [nothing[1]] * empties)
    assert (merged == 0).all()
    assert (merged_lse == -math.inf).all()
    merged, merged_lse = merge_states([nothing[0], out], [nothing[1], lse])
    assert same_bytes(merged.float(), out)
    assert same_bytes(merged_lse.float(), lse)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.float8_e4m3fn, [448.0, -448.0, 1.0, 2.0**-9, 0.0]),
        (torch.float8_e5m2, [512.0, -57344.0, 1.0, 2.0**-10, 0.0]),
        (torch.float32, [500.0, -1e6, 1.0625, 0.001, 0.0]),
    ],
)
def test_quantise_rounds_to_nearest_even_and_saturates(dtype, stored):
    x = torch.tensor([500.0, -1e6, 1.0625, 0.001, 0.0])
    assert reference.quantise(x, dtype).tolist() == pytest.approx(stored, rel=1e-7)
    scaled = reference.quantise(x[None, :, None] * 2, dtype, torch.tensor([2.0]))
    assert scaled.flatten().tolist() == pytest.approx(stored, rel=1e-7)


def test_write_kv_cache_touches_the_addressed_slots_alone():
    k = torch.arange(1.0, 5.0).reshape(4, 1, 1)
    k_cache, v_cache = torch.zeros(3, 4, 1, 1), torch.zeros(3, 4, 1, 1)
    slots = torch.tensor([3, -1, 7])  # and a padding row
    reference.write_kv_cache(k, -k, k_cache, v_cache, slots)
    expected = torch.zeros(12)
    expected[3], expected[7] = 1.0, 3.0
    assert torch.equal(k_cache.flatten(), expected)
    assert torch.equal(v_cache.flatten(), -expected)


def test_gather_kv_cache_returns_what_was_written():
    k, v = torch.randn(2, 7, 2, 8, generator=generator(0)).half()
    pools = [torch.zeros(4, 2, 2, 8, dtype=torch.float8_e4m3fn) for _ in range(2)]
    slots = torch.tensor([6, 7, 2, 3, 0, 4, 5])
    scales = {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": 0.25}
    reference.write_kv_cache(k, v, *pools, slots, **scales)
    table, lens = torch.tensor([[3, 1, 0], [2, 9, 9]]), torch.tensor([5, 2], dtype=torch.int32)
    packed = {"cu_seqlens_k": cumulative([5, 2]), "total_k": 9, "out_dtype": torch.float32}
    for back, x in zip(
        reference.gather_kv_cache(*pools, table, lens, **packed, **scales), (k, v), strict=True
    ):
        torch.testing.assert_close(back[:7], x.float(), rtol=2**-4, atol=2**-9)
        assert (back[7:] == 0).all()


def test_copy_blocks_copies_pages_within_each_cache():
    caches = [torch.arange(8.0).reshape(4, 2, 1, 1), torch.arange(8.0, 16.0).reshape(4, 2, 1, 1)]
    reference.copy_blocks(caches, torch.tensor([[0, 2], [1, 3]]))
    assert caches[0].flatten().tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert caches[1].flatten().tolist() == [8, 9, 10, 11, 8, 9, 10, 11]


def test_reference_needs_no_triton():
    code = "import sys, tritonattn.reference; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
