"""Batches, graphs, streams and compiles: what a serving loop asks of a call."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from faults import (
    FUNCTIONS,
    PAGED,
    PREFIX,
    VARLEN,
    Path,
    assert_oracle,
    case,
    check,
    every_function,
)
from launches import recorded
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tritonattn
from tritonattn import attend, binaries, launch, plan
from tritonattn import device as devices
from tritonattn.inputs import TENSORS
from tritonattn.testing import cumulative

H200 = devices.target(90, sm_count=132)

# Neighbours


def batch_of(function, sequences, device, *, dtype=torch.float16, decode=False):
    """A call of these sequences (seed, queries, keys), each with the same values in any batch."""
    q, k, v, pages, table, rows, used = [], [], [], [], [], [], 0
    is_prefix = function == PREFIX
    for seed, lq, lk in sequences:
        gen = torch.Generator().manual_seed(seed)
        q.append(torch.randn(lq, 4, 16, generator=gen))
        keys = torch.randn(2, lk, 2, 16, generator=gen)
        cached = lk - lq * is_prefix
        k.append(keys[0, cached * is_prefix :])
        v.append(keys[1, cached * is_prefix :])
        count = -(-cached // 8)
        page = torch.zeros(2, count, 8, 2, 16)
        page.view(2, -1, 2, 16)[:, :cached] = keys[:, :cached]
        pages.append(page)
        ids = torch.zeros(16, dtype=torch.int32)
        ids[:count] = torch.arange(used, used + count)
        table.append(ids)
        used += count
        rows.append(cached)
    q, k, v = (torch.cat(x).to(device, dtype) for x in (q, k, v))
    caches = torch.cat(pages, dim=1).to(device, dtype)
    table = torch.stack(table).to(device)
    lens = torch.tensor(rows, dtype=torch.int32, device=device)
    cu_q = cumulative([lq for _, lq, _ in sequences], device)
    if function == VARLEN:
        return (q, k, v, cu_q, cumulative([lk for _, _, lk in sequences], device)), {}
    if is_prefix:
        return (q, k, v, *caches, table, cu_q, lens), {}
    return (q, *caches, table, lens), {} if decode else {"cu_seqlens_q": cu_q}


MIXES = {
    "chunks": ((3, 70), [(1, 1), (20, 90), (2, 2), (40, 40)]),
    "one_token": ((1, 100), [(9, 40), (1, 5), (1, 120), (33, 64)]),
}


@pytest.fixture
def short_splits(monkeypatch):
    """Of 64 keys, so that a hundred are split."""
    launch.forget()
    monkeypatch.setattr(plan, "INVARIANT_SPLIT", 64)
    yield
    launch.forget()


@every_function
@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_attention_bits_do_not_depend_on_neighbours(function, mix, place, device):
    """flash-attention PR 2450, vllm 51902: alone, and first, third or last of a batch of five.

    The sequence is longer than a split, so that it is also merged.
    """
    (lq, lk), others = MIXES[mix]
    sequences = [(i + 1, *lens) for i, lens in enumerate(others)]
    sequences.insert(place, (0, lq, lk))
    options = {"batch_invariant": True, "return_lse": True, "window_size": (80, 0)}
    args, rest = batch_of(function, [(0, lq, lk)], device)
    alone, alone_lse = getattr(tritonattn, function)(*args, **rest, **options)
    args, rest = batch_of(function, sequences, device)
    out, lse = getattr(tritonattn, function)(*args, **rest, **options)
    start = sum(q for _, q, _ in sequences[:place])
    assert torch.equal(out[start : start + lq], alone)
    assert torch.equal(lse[:, start : start + lq], alone_lse)


@pytest.mark.usefixtures("short_splits")
def test_paged_attention_decode_bits_do_not_depend_on_neighbours(device):
    lens = [100, 1, 128, 7, 65]
    sequences = [(i, 1, lk) for i, lk in enumerate(lens)]
    args, options = batch_of(PAGED, sequences, device, decode=True)
    options |= {"batch_invariant": True}
    out = tritonattn.paged_attention(*args, **options)
    for i, sequence in enumerate(sequences):
        args, rest = batch_of(PAGED, [sequence], device, decode=True)
        assert torch.equal(tritonattn.paged_attention(*args, **rest, **options), out[i : i + 1])


@every_function
@pytest.mark.parametrize("max_seqlens", [False, True])
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (8, 8), (32, 4), (71, 1)], ids=str)
def test_attention_batch_invariance_picks_one_binary(function, max_seqlens, heads):
    """On a GPU the tiles could depend on the batch: its size, its bounds, a lone token."""
    picked = set()
    for q_lens, k_lens in (
        ((1,), (5,)),
        ((1,), (9000,)),
        ((300,), (300,)),
        ((1, 1, 1), (1, 7, 90)),
        ((1, 2000, 3), (1, 2000, 3)),
        ((1,) * 200, (1000,) * 200),
    ):
        how = {"heads": heads, "head_dims": (16, 16), "page_size": 256, "max_seqlens": max_seqlens}
        args, options = case(Path(function), k_lens, q_lens, **how).build()
        with recorded(H200) as launches:
            getattr(tritonattn, function)(*args, **options, batch_invariant=True, return_lse=True)
        attention = launches[0]
        # Where the keys do not fill a split, one split or several are the same sum.
        spec = attention.constants["SPEC"]
        picked.add((spec.BLOCK_M, spec.BLOCK_N, spec.PACK, attention.options, attention.args[-1]))
    assert len({x[:4] for x in picked}) == 1
    assert len({x[4] for x in picked} - {0}) <= 1  # tiles a split; 0: a single split


@every_function
def test_attention_bounds_do_not_change_the_result(function, device):
    """transformers 45323, FlashInfer 4647: results that depend on max_seqlen."""
    how = {"heads": (2, 1), "head_dims": (16, 16), "poison": "nan"}
    args, options = case(Path(function), (40, 3), (2, 1), **how).build(device)
    for bound_q, bound_k in ((None, None), (2, 40), (2, None), (None, 40), (1024, 10**6)):
        for num_splits in (0, 3):
            bounds = {"max_seqlen_q": bound_q, "max_seqlen_k": bound_k, "num_splits": num_splits}
            check(Path(function), args, options | bounds)


# What a call asks the device


class Refusal(TorchDispatchMode):
    """Fails where a tensor's value is asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(x in name for x in ("_local_scalar_dense", "nonzero", "is_nonzero", "_to_copy")):
            raise AssertionError(f"a value was asked for by {name}")
        return func(*args, **(kwargs or {}))


VALUE_METHODS = (
    "item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__len__",
    "__iter__", "__contains__",
)  # fmt: skip
EVERY_OPTION = {
    "heads": (4, 2), "head_dims": (16, 24), "alibi": 2, "sinks": True, "query_scale": True,
    "tree_mask": True, "out": "sliced", "option_dtype": torch.float32,
}  # fmt: skip


def full_case(function):
    """A call with every option that is a tensor."""
    more = {"kv_scale": "[B, Hkv]"}
    options = {"window_size": (9, 0), "chunk_size": 16, "softcap": 5.0, "return_lse": True}
    return case(Path(function), (40, 3), (2, 1), **EVERY_OPTION, **more, options=options)


@every_function
@pytest.mark.parametrize("num_splits", [0, 1, 8])
def test_attention_asks_no_tensor_for_its_value(function, num_splits, monkeypatch):
    """flash-attention 1664, transformers 41803: ``.item()`` a call makes the CPU wait each time."""
    args, options = full_case(function).build()
    options["num_splits"] = num_splits

    def refuse(name):
        def method(*_: Any, **__: Any) -> Any:
            raise AssertionError(f"a value was asked for by Tensor.{name}")

        return method

    # What the operator does, no mode sees.
    monkeypatch.setattr(attend, "is_traced", lambda _: False)
    with recorded(H200) as launches, Refusal():
        for name in VALUE_METHODS:
            monkeypatch.setattr(torch.Tensor, name, refuse(name))
        getattr(tritonattn, function)(*args, **options)
        monkeypatch.undo()
    assert launches


@every_function
@pytest.mark.parametrize("num_splits", [1, 8])
def test_attention_goes_up_to_the_launch_with_fake_tensors(function, num_splits, monkeypatch):
    """They have shapes and no value to give; only where they start has to be made up."""
    args, options = full_case(function).build()
    options["num_splits"] = num_splits
    monkeypatch.setattr(attend, "is_traced", lambda _: False)  # else the operator's fake is enough
    with FakeTensorMode() as mode, recorded(H200) as launches:
        monkeypatch.setattr(FakeTensor, "data_ptr", lambda _: 0, raising=False)
        fake = [mode.from_tensor(x) for x in args]
        named = {
            name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
            for name, x in options.items()
        }
        out, lse = getattr(tritonattn, function)(*fake, **named)
    assert launches
    assert out.shape == (3, 4, 24)
    assert lse.shape == (4, 3)


@pytest.mark.gpu
@every_function
@pytest.mark.parametrize("num_splits", [0, 1, 8])
def test_attention_waits_for_nothing_on_the_gpu(function, num_splits, device):
    args, options = full_case(function).build(device)
    options["num_splits"] = num_splits
    function = getattr(tritonattn, function)
    function(*args, **options)  # compiling may wait
    torch.cuda.synchronize()
    with refusing_to_wait():
        for _ in range(2):
            function(*args, **options)


@contextlib.contextmanager
def refusing_to_wait():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_merge_states_waits_for_nothing_on_the_gpu(device):
    outs, lses = torch.randn(3, 7, 2, 16, device=device), torch.randn(3, 2, 7, device=device)
    tritonattn.merge_states(outs, lses)
    torch.cuda.synchronize()
    with refusing_to_wait():
        tritonattn.merge_states(outs, lses)


# CUDA graphs


def buffers(function, device, *, batch, rows, capacity=1024, heads=(4, 2), dims=(64, 64)):
    """Static memory of a captured call: (args, options), lengths all 0."""
    how = {"device": device, "dtype": torch.float16}
    q = torch.zeros(rows, heads[0], dims[0], **how)
    total_k = batch * capacity if function == VARLEN else rows
    new = [torch.zeros(total_k, heads[1], d, **how) for d in dims]
    caches = [torch.zeros(batch * capacity // 16, 16, heads[1], d, **how) for d in dims]
    table = torch.zeros(batch, capacity // 16, dtype=torch.int32, device=device)
    cu_q, cu_k = torch.zeros(2, batch + 1, dtype=torch.int32, device=device)
    lens = torch.zeros(batch, dtype=torch.int32, device=device)
    if function == VARLEN:
        return (q, *new, cu_q, cu_k), {}
    if function == PREFIX:
        return (q, *new, *caches, table, cu_q, lens), {}
    return (q, *caches, table, lens), {"cu_seqlens_q": cu_q}


def fill(function, args, options, q_lens, k_lens, seed):
    """New values, and ``k_lens`` keys in all, in the same memory."""
    gen = torch.Generator().manual_seed(seed)
    for x in args:
        if x.is_floating_point():
            x.copy_(torch.randn(x.shape, generator=gen))
        elif x.dim() == 2:  # the block table
            x.copy_(torch.randperm(x.numel(), generator=gen).view(x.shape))
    named = dict(zip(TENSORS[function], args, strict=True)) | options
    lens = torch.tensor(k_lens, dtype=torch.int32)
    if "cu_seqlens_q" in named:
        named["cu_seqlens_q"].copy_(cumulative(q_lens))
    if function == VARLEN:
        named["cu_seqlens_k"].copy_(cumulative(k_lens))
    elif function == PREFIX:
        named["context_lens"].copy_(lens - torch.tensor(q_lens))
    else:
        named["seq_lens"].copy_(lens)


def captured(function, args, options, *, warm_up=True, pool=None):
    """(graph, its static out and lse)."""
    call = getattr(tritonattn, function)
    if warm_up:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(*args, **options, return_lse=True)
        torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out, lse = call(*args, **options, return_lse=True)
    return graph, out, lse


@pytest.mark.gpu
@every_function
@pytest.mark.parametrize("num_splits", [0, 1, 8])
def test_attention_graph_is_right_for_other_lengths(function, num_splits, device):
    """torchtitan PR 3893, transformers 45323: a bound of the captured batch was baked in."""
    args, options = buffers(function, device, batch=2, rows=6)
    fill(function, args, options, (1, 1), (1, 1), 0)
    bounds = {"max_seqlen_q": 4, "max_seqlen_k": 1024, "num_splits": num_splits}
    graph, out, lse = captured(function, args, options | bounds)
    for seed, (q_lens, k_lens) in enumerate(
        [
            ((1, 1), (1024, 3)),
            ((4, 2), (4, 1000)),
            ((0, 3), (0, 77)),
            ((1, 1), (1, 1)),
            ((0, 0), (0, 0)),
        ]
    ):
        fill(function, args, options, q_lens, k_lens, seed)
        out.fill_(torch.nan)
        graph.replay()
        assert_oracle(function, args, options, out, lse)


@pytest.mark.gpu
@every_function
def test_attention_graphs_of_several_batches_may_share_memory(function, device):
    """sglang 26532: captured from the largest batch down, they shared scratch of the wrong size."""
    graphs, pool = {}, torch.cuda.graph_pool_handle()
    for batch in (8, 4, 2):
        args, options = buffers(function, device, batch=batch, rows=batch)
        fill(function, args, options, (1,) * batch, (9,) * batch, 0)
        splits = {"num_splits": 8, "max_seqlen_q": 1}
        graphs[batch] = args, options, captured(function, args, options | splits, pool=pool)
    for seed, batch in enumerate((8, 4, 2, 2, 4, 8, 2, 8)):
        args, options, (graph, out, lse) = graphs[batch]
        fill(function, args, options, (1,) * batch, range(900, 900 + batch), seed)
        graph.replay()
        assert_oracle(function, args, options, out, lse)


@pytest.mark.gpu
@every_function
@pytest.mark.parametrize("num_splits", [1, 4])
def test_attention_may_be_compiled_inside_a_capture(function, num_splits, device):
    """triton 10596: the first call of a new kind tunes, or compiles, inside the capture."""
    dims = (40 + 8 * FUNCTIONS.index(function), 24 + 8 * num_splits)
    args, options = buffers(function, device, batch=2, rows=2, dims=dims)
    fill(function, args, options, (1, 1), (5, 300), 0)
    options |= {"num_splits": num_splits, "softcap": 7.0}
    compiled = binaries.count()
    graph, out, lse = captured(function, args, options, warm_up=False)
    assert binaries.count() > compiled
    for seed in range(2):
        fill(function, args, options, (1, 1), (1000, 17), seed)
        graph.replay()
        assert_oracle(function, args, options, out, lse)


# Other devices and streams


@pytest.mark.two_gpus
@every_function
@pytest.mark.parametrize("num_splits", [1, 3])
def test_attention_runs_where_its_tensors_are(function, num_splits, device):
    """pytorch 141010, xformers 681: launched on the current device instead."""
    assert torch.cuda.current_device() == 0
    how = {"heads": (4, 2), "head_dims": (32, 32)}
    args, options = case(Path(function), (40, 3), (2, 1), **how).build("cuda:1")
    out, lse = check(Path(function, num_splits), args, options)
    assert out.device == lse.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    nothing = torch.full_like(lse, -torch.inf)
    merged, _ = tritonattn.merge_states([out, out], [nothing, lse])
    assert torch.equal(merged, out)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@every_function
def test_attention_runs_on_the_current_stream(function, device):
    """The result must wait for what the caller's stream still does to the inputs."""
    how = {"heads": (4, 2), "head_dims": (64, 64)}
    args, options = case(Path(function), (900,), (2,), **how).build(device)
    check(Path(function), args, options)
    right = args[0].clone()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        args[0].zero_()
        torch.cuda._sleep(50_000_000)
        args[0].copy_(right)
        out, lse = getattr(tritonattn, function)(*args, **options, return_lse=True)
    stream.synchronize()
    assert_oracle(function, args, options, out, lse)


# Compiles


def serving_calls(function, device):
    """Decode and prefill steps of many sizes, as a server meets them."""
    sizes = [((1,) * batch, tuple(range(1, batch + 1))) for batch in range(1, 41)]
    sizes += [((n,), (n,)) for n in (1, 3, 16, 17, 33)]
    sizes += [((n, 1, 2), (40, n, 33)) for n in (1, 3, 16, 17, 33)]
    for q_lens, k_lens in sizes:
        k_lens = tuple(max(pair) for pair in zip(q_lens, k_lens, strict=True))
        how = {"heads": (8, 2), "head_dims": (64, 64), "max_seqlens": True}
        yield case(Path(function, plain_decode=True), k_lens, q_lens, **how).build(device)


# Tiles of 16, 32, 64 and 128 rows, with and without lse for splits, and what merges these.
COMPILES = 9


@every_function
def test_attention_compiles_no_kernel_for_a_length_or_a_batch(function):
    """Liger-Kernel 146, vllm 43009: lengths 1, 3, 16, 17, 33 and batches 1 to 40."""
    keys = set()
    for args, options in serving_calls(function, "cpu"):
        with recorded(H200) as launches:
            getattr(tritonattn, function)(*args, **options)
        keys |= {call.key for call in launches}
    assert len(keys) <= COMPILES


@pytest.mark.gpu
@every_function
def test_attention_compiles_no_kernel_for_a_length_or_a_batch_on_the_gpu(function, device):
    before = binaries.count()
    for args, options in serving_calls(function, device):
        getattr(tritonattn, function)(*args, **options)
    assert binaries.count() - before <= COMPILES


@every_function
def test_attention_compiles_no_kernel_for_a_stride_or_a_page(function):
    """Values of 1 and multiples of 16 are special to Triton's own launcher."""
    keys = set()
    layouts = itertools.product(("contiguous", "head_major"), (16, 48, 80), (17, 64, 1))
    for layout, pages, lk in layouts:
        how = {"heads": (8, 2), "head_dims": (64, 64), "layout": layout, "page_size": pages}
        args, options = case(Path(function), (lk, lk), (1, 1), **how).build()
        with recorded(H200) as launches:
            getattr(tritonattn, function)(*args, **options, num_splits=1)
        keys |= {call.key for call in launches}
    # Pages of a power of two are a kernel of their own.
    assert len(keys) == (1 if function == VARLEN else 2)
