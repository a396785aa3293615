"""The attention functions against the oracle, over drawn calls, and what holds between calls."""

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonattn as ta
from tritonattn import reference
from tritonattn.inputs import cumulative, generator, kv_pool, normal, packed_keys
from tritonattn.strategies import OPTIONS, paged_cases, prefix_cases, varlen_cases
from tritonattn.testing import Case, assert_close, check
from tritonattn.tuning.config import KernelConfig
from tritonattn.tuning.store import force

SCORES = {"softmax_scale", "softcap", "alibi_slopes", "sinks", "query_scale", "return_lse"}
MASKS = {
    "causal", "window_size", "chunk_size", "tree_mask", "padding_rows", "negative_lengths",
    "return_lse", "poison",
}  # fmt: skip
SPLITS = {"num_splits", "batch_invariant", "window_size", "sinks", "return_lse", "poison"}
MEMORY = {
    "layout", "out", "int64_table", "block_indptr", "padding_rows", "poison", "max_seqlens",
    "kv_scale", "fp8",
}  # fmt: skip
GROUPS = {"masks": MASKS, "scores": SCORES, "splits": SPLITS, "memory": MEMORY}
SMALL = {"heads": ((2, 2), (4, 2), (3, 1)), "head_dims": ((16, 16), (32, 32))}
FUNCTIONS = ("varlen_attention", "prefix_attention", "paged_attention")
CASES = {"varlen": varlen_cases, "prefix": prefix_cases, "paged": paged_cases}


@pytest.mark.parametrize("function", CASES)
@pytest.mark.parametrize("group", GROUPS)
@settings(max_examples=12)
@given(data=st.data())
def test_attention_equals_the_oracle(function, group, data, device):
    cases = CASES[function](options=GROUPS[group], max_len=40, **SMALL)
    check(data.draw(cases), device=device)


@pytest.mark.parametrize("function", CASES)
@given(data=st.data())
def test_attention_equals_the_oracle_with_every_option(function, data, device):
    check(data.draw(CASES[function](options=OPTIONS)), device=device)


@pytest.mark.parametrize("function", CASES)
@given(data=st.data())
def test_attention_probe_sees_exactly_the_mask(function, data, device):
    """q = 0 and V row j = e_j: out shows which keys a row saw, equally weighted, lse how many."""
    shape = {"max_len": 30, "head_dims": ((32, 64),), "heads": ((2, 1),)}
    case = data.draw(CASES[function](options=MASKS - {"poison"}, **shape))
    check(dataclasses.replace(case, probe=True), device=device)


def configs(case: Case) -> Iterator[KernelConfig]:
    group = case.heads[0] // case.heads[1]
    for block_m, block_n, pack in ((16, 16, 1), (16, 32, 1), (32, 16, group), (64, 64, 2)):
        yield KernelConfig(block_m, block_n, min(pack, group, block_m), 4, 2)


@pytest.mark.parametrize("function", CASES)
@settings(max_examples=5)
@given(data=st.data())
def test_attention_any_config_gives_the_same_result(function, data, device):
    """A configuration holds no meaning: small tiles put every edge inside the drawn lengths."""
    shape = {"head_dims": ((16, 16),), "heads": ((3, 1), (4, 2))}
    case = data.draw(CASES[function](options=MASKS | SPLITS, **shape))
    for config in configs(case):
        with force(config):
            check(case, device=device)


def truths(*args, **options):
    """The oracle, and what PyTorch attention in the inputs' dtype gives."""
    both = (torch.float64, args[0].dtype)
    return [reference.varlen_attention(*args, **options, compute_dtype=dtype) for dtype in both]


@settings(max_examples=8)
@given(
    n=st.integers(1, 50), cut=st.integers(1, 50), page_size=st.sampled_from((1, 7, 16)),
    window=st.sampled_from((None, (5, None))), seed=st.integers(0, 99),
)  # fmt: skip
def test_prefix_attention_any_cutting_equals_whole_prefill(n, cut, page_size, window, seed, device):
    """So does paged_attention with the chunk already written, and decode equals the last row."""
    g = generator(seed)
    how = {"dtype": torch.float32, "generator": g, "device": device}
    q = normal(n, 4, 32, **how)
    k, v = packed_keys(n, 2, 32, 32, **how)
    cu = cumulative((n,), device=device)
    oracle, same_dtype = truths(q, k, v, cu, cu, window_size=window)

    def assert_equals_whole(out, part):
        assert_close(out, oracle[part], same_dtype[part], dtype=torch.float32)

    assert_equals_whole(ta.varlen_attention(q, k, v, cu, cu, window_size=window), slice(n))
    pages = -(-n // page_size)
    k_cache, v_cache = kv_pool(pages, page_size, 2, 32, 32, **how)
    table = torch.randperm(pages, generator=g).to(torch.int32).to(device)[None]
    in_page = torch.arange(page_size, device=device)
    slots = (table[0].long()[:, None] * page_size + in_page).flatten()
    for start in range(0, n, cut):
        part = slice(start, min(start + cut, n))
        context = torch.tensor([start], dtype=torch.int32, device=device)
        cu = cumulative((part.stop - start,), device=device)
        new = (q[part], k[part], v[part])
        out = ta.prefix_attention(*new, k_cache, v_cache, table, cu, context, window_size=window)
        assert_equals_whole(out, part)
        ta.write_kv_cache(*new[1:], k_cache, v_cache, slots[part])
        lens = context + (part.stop - start)
        cached = (k_cache, v_cache, table, lens)
        out = ta.paged_attention(q[part], *cached, cu_seqlens_q=cu, window_size=window)
        assert_equals_whole(out, part)
    decode = ta.paged_attention(q[-1:], k_cache, v_cache, table, lens, window_size=window)
    assert_equals_whole(decode, slice(n - 1, n))


SHAPE = {"heads": (4, 2), "head_dims": (32, 32), "dtype": torch.float16}
PAGED = Case("paged_attention", k_lens=(37, 0, 64, 5), page_size=16, **SHAPE)


@pytest.mark.parametrize("splits", [1, 3])
def test_paged_attention_permuting_pages_changes_no_bit(splits, device):
    args, kwargs = PAGED.build(device)
    q, k_cache, v_cache, table, seq_lens = args
    out = ta.paged_attention(*args, **kwargs, num_splits=splits)
    order = torch.randperm(k_cache.shape[0], generator=generator(1)).to(device)
    moved = order.argsort().to(table.dtype)[table.long()]
    pools = k_cache[order], v_cache[order]
    again = ta.paged_attention(q, *pools, moved, seq_lens, **kwargs, num_splits=splits)
    assert torch.equal(out, again)


def test_paged_attention_batch_order_does_not_matter(device):
    args, kwargs = PAGED.build(device)
    q, k_cache, v_cache, table, seq_lens = args
    order = torch.tensor([2, 0, 3, 1], device=device)
    out = ta.paged_attention(*args, **kwargs)
    again = ta.paged_attention(q[order], k_cache, v_cache, table[order], seq_lens[order], **kwargs)
    assert torch.equal(out[order], again)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_attention_window_wider_than_the_sequence_equals_none(function, device):
    case = Case(function, k_lens=(37, 20), q_lens=(9, 20), **SHAPE)
    args, kwargs = case.build(device)
    call = getattr(ta, function)
    plain = call(*args, **kwargs)
    for window in ((100, None), (100, 100), (2**40, -1)):
        assert torch.equal(plain, call(*args, **kwargs, window_size=window))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_attention_same_call_gives_the_same_bits(function, device):
    case = Case(function, k_lens=(37, 70), q_lens=(9, 20), **SHAPE)
    args, kwargs = case.build(device)
    first, second = (getattr(ta, function)(*args, **kwargs, num_splits=3) for _ in range(2))
    assert torch.equal(first, second)


@settings(max_examples=8)
@given(n=st.integers(1, 60), cuts=st.lists(st.integers(0, 60), max_size=4), seed=st.integers(0, 99))
def test_merge_states_any_partition_of_the_keys_equals_one_pass(n, cuts, seed, device):
    how = {"dtype": torch.float32, "generator": generator(seed), "device": device}
    q = normal(3, 2, 32, **how)
    k, v = packed_keys(n, 2, 32, 32, **how)
    edges = [0, *sorted(min(c, n) for c in cuts), n]
    cu_q = cumulative((3,), device=device)
    options = {"causal": False, "return_lse": True}

    def part(a, b):
        cu_k = cumulative((b - a,), device=device)
        return ta.varlen_attention(q, k[a:b], v[a:b], cu_q, cu_k, **options)

    parts = [part(a, b) for a, b in itertools.pairwise(edges)]
    merged = ta.merge_states([p[0] for p in parts], [p[1] for p in parts])
    oracle, same_dtype = truths(q, k, v, cu_q, cumulative((n,), device=device), **options)
    for i, name in enumerate(("out", "lse")):
        assert_close(merged[i], oracle[i], same_dtype[i], dtype=torch.float32, name=name)


def test_attention_float64_is_refused_and_names_the_way_out(device):
    q = torch.zeros(1, 1, 16, dtype=torch.float64, device=device)
    cu = cumulative((1,), device=device)
    with pytest.raises(TypeError, match=r"varlen_attention: q .*float64"):
        ta.varlen_attention(q, q, q, cu, cu)
