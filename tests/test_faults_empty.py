"""Rows without keys, log-sum-exp, splits and merging: faults that other attention kernels had."""

from __future__ import annotations

import math

import pytest
import torch
from faults import (
    FUNCTIONS,
    PAGED,
    PATHS,
    PREFIX,
    VARLEN,
    Path,
    arrange,
    assert_result,
    assert_sees,
    case,
    check_case,
    every_path,
    rows,
)

import tritonattn
from tritonattn import testing
from tritonattn.testing import Case, same_bytes
from tritonattn.tuning.config import KernelConfig
from tritonattn.tuning.store import force

LONGER_PATHS = [path for path in PATHS if path.function != PREFIX]  # queries may outnumber keys
INF = math.inf

# Rows and lengths without keys


@pytest.mark.parametrize("path", LONGER_PATHS, ids=str)
@pytest.mark.parametrize("sink", [None, 0.5])
def test_attention_of_no_keys_is_zero_with_lse_minus_infinity(path, sink, device):
    """flash-attention PR 2470, 2503, 978: a crash; lse +inf.  A sink is then all of lse."""
    q, k, v = rows([], torch.empty(0, 8), lq=3, heads=2)
    options = {} if sink is None else {"sinks": torch.full((2,), sink, device=device)}
    args, options = arrange(path, q, k, v, device, **options)
    assert_result(path, args, options, 0.0, -INF if sink is None else sink)


@every_path
def test_attention_of_no_queries_is_empty(path, device):
    q, k, v = rows([1.0, 2.0], [3.0, 4.0], lq=0)
    args, options = arrange(path, q, k, v, device)
    out, lse = path(*args, **options, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 1, 1), (1, 0))


@every_path
def test_attention_of_no_sequences_is_empty(path, device):
    q_lens = None if path.function == PAGED and path.plain_decode else ()
    args, options = Case(path.function, (), q_lens).build(device)
    out, lse = path(*args, **options, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 4, 64), (4, 0))


@pytest.mark.parametrize("function", [PREFIX, PAGED])
def test_attention_with_a_cache_without_pages_sees_nothing_in_it(function, device):
    """No page at all, and a block table of no columns: what a server has before its first token."""
    q_lens = (2, 1)
    args, options = Case(function, (0, 0), q_lens, head_dims=(16, 16)).build(device)
    tensors = [x[:0] if x.dim() == 4 else x for x in args]
    tensors = [x[:, :0] if x.dim() == 2 else x for x in tensors]
    out = tritonattn.__dict__[function](*tensors, **options)
    if function == PREFIX:
        v = args[2].repeat_interleave(2, dim=1)  # the first new token sees itself alone
        assert torch.equal(out[[0, 2]], v[[0, 2]])
    else:
        assert not out.any()


@every_path
def test_attention_writes_the_rows_of_empty_sequences(path, device):
    """FlashInfer PR 4975, vllm 37442, 57094: rows never written, or 0/0."""
    lengths = (0, 5) if path.function != PREFIX else (1, 6)
    out, lse = check_case(
        path, lengths, (1, 1), device, heads=(4, 2), head_dims=(16, 16), poison="nan"
    )
    if path.function != PREFIX:
        assert not out[0].any()
        assert (lse[:, 0] == -INF).all()


@every_path
def test_attention_writes_the_rows_past_the_last_sequence(path, device):
    """The rows by which a captured graph's batch is longer than the one that is run."""
    how = {"heads": (4, 2), "head_dims": (16, 16), "padding_rows": 20, "poison": "nan"}
    plain = Path(path.function, path.num_splits, path.small_tiles)  # with cu_seqlens_q
    out, lse = check_case(plain, (4, 9), (1, 2), device, **how, sinks=True)
    assert out.shape[0] == 23
    assert not out[3:].any()
    assert (lse[:, 3:] == -INF).all()


@pytest.mark.parametrize("path", LONGER_PATHS, ids=str)
def test_attention_row_that_sees_nothing_is_zero(path, device):
    """pytorch 103963: wholly masked rows become NaN."""
    options = {"window_size": (0, 0), "causal": False}
    assert_sees(path, [(4, 2, [[], [], [0], [1]])], device, **options)


@every_path
def test_attention_row_whose_tree_is_empty_is_zero(path, device):
    """A row that its own tree mask hides, in a sequence without other keys."""
    tree = torch.tensor([[1, 0], [0, 0]], dtype=torch.bool, device=device)
    assert_sees(path, [(2, 2, [[0], []])], device, tree_mask=tree)


@every_path
def test_attention_row_may_see_its_first_key_late(path, device):
    """vllm 48364: 16 keys masked, the next one valid: -inf minus -inf."""
    assert_sees(path, [(1, 17, [[16]])], device, window_size=(0, 0))
    tree = torch.eye(20, dtype=torch.bool, device=device)
    assert_sees(path, [(20, 20, [[i] for i in range(20)])], device, tree_mask=tree)


# lse


@every_path
def test_attention_lse_is_a_natural_logarithm(path, device):
    """FlashInfer 2113: base 2 where the caller expects base e."""
    args, options = arrange(path, *rows([0.0] * 8, [1.0] * 8), device)
    assert_result(path, args, options, 1.0, math.log(8))  # 2.0794


@every_path
def test_attention_weighs_parts_by_their_own_lse(path, device):
    """sglang 40903, pytorch 181645: base-2 and base-e lse mixed where parts meet.

    12 keys of value 0, then 4 of value 1: cached and new ones, tiles, splits, and merged by hand.
    """
    values = [0.0] * 12 + [1.0] * 4
    q, k, v = rows([0.0] * 16, values, lq=4)
    args, options = arrange(path, q, k, v, device, causal=False)
    assert_result(path, args, options, 0.25, math.log(16))
    states = []
    for part in (slice(12), slice(12, 16)):
        args, options = arrange(path, q, k[part], v[part], device, causal=False)
        states.append(path(*args, **options, return_lse=True))
    out, lse = tritonattn.merge_states(*zip(*states, strict=True))
    assert (out == 0.25).all()
    right = torch.full((1, 4), math.log(16), dtype=torch.float64, device=device)
    testing.assert_close(lse, right, right, dtype=torch.float32, name="lse")


# Splits


@pytest.mark.parametrize("function", FUNCTIONS)
def test_attention_may_have_more_splits_than_keys(function, device):
    """sglang 2465: the splits without keys were merged with what their scratch held.

    One tile holds all keys, so that the other splits must change no bit.
    """
    path = Path(function)
    how = {"heads": (2, 1), "head_dims": (16, 16), "poison": "nan"}
    args, options = case(path, (3, 20), (2, 1), **how).build(device)
    with force(KernelConfig(block_m=16, block_n=64, pack=2, num_warps=4, num_stages=1)):
        whole = path(*args, **options, return_lse=True)
        split = path(*args, **options, return_lse=True, num_splits=8)
    assert all(map(torch.equal, split, whole))
    check_case(path, (3, 20), (2, 1), device, **how, options={"num_splits": 8})
    check_case(Path(function, 8, small_tiles=True), (3, 20), (2, 1), device, **how)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_attention_window_may_leave_splits_empty(function, device):
    """vllm PR 47188: keys before the window made splits, which were merged though empty."""
    path = Path(function, num_splits=16, small_tiles=True, plain_decode=True)
    assert_sees(path, [(1, 40, [range(32, 40)])], device, window_size=(7, 0))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_attention_splits_write_every_row(function, device):
    """pytorch 194167: two sequences of 1024 cached keys in pages of 256, two splits."""
    path = Path(function, num_splits=2)
    new = 3
    how = {"heads": (1, 1), "head_dims": (16, 16), "page_size": 256}
    check_case(path, (1024 + new, 1024 + new), (new, new), device, **how)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("num_splits", [2, 3, 8])
def test_attention_splits_of_mixed_lengths_equal_the_oracle(function, num_splits, device):
    """Each sequence is split by its own length; a sink counts in one split only."""
    path = Path(function, num_splits, small_tiles=True)
    how = {"heads": (2, 2), "head_dims": (16, 32), "sinks": True, "poison": "nan"}
    check_case(path, (1, 70, 17), (1, 2, 1), device, **how)


# Merging


@every_path
def test_merge_states_of_attention_without_keys_changes_nothing(path, device):
    """The same with states that attention itself gave."""
    q, k, v = rows([1.0, 2.0, 3.0], [1.0, 2.0, 4.0], heads=2)
    out, lse = path(*(made := arrange(path, q, k, v, device))[0], **made[1], return_lse=True)
    nothing = Path(VARLEN, path.num_splits)
    args, options = arrange(nothing, q, k[:0], v[:0], device)
    empty = nothing(*args, **options, return_lse=True)
    merged, merged_lse = tritonattn.merge_states((out, empty[0]), (lse, empty[1]))
    assert same_bytes(merged, out)
    assert same_bytes(merged_lse, lse)


@every_path
def test_attention_without_queries_or_keys_beside_a_long_sequence_equals_the_oracle(path, device):
    """Some sequences without keys, some without queries, and one that wants splits."""
    k_lens = (1, 0, 41, 5) if path.function == PREFIX else (0, 0, 41, 5)
    how = {"heads": (2, 1), "head_dims": (16, 16), "poison": "nan"}
    check_case(path, k_lens, (1, 0, 1, 0), device, **how)
