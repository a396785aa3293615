"""Offsets past 32 bits, strides and grids: faults that other attention kernels had."""

from __future__ import annotations

import pytest
import torch
from faults import (
    FUNCTIONS,
    PAGED,
    PREFIX,
    VARLEN,
    Path,
    case,
    check,
    every_function,
    every_path,
    run_script,
)
from launches import recorded

import tritonattn
from tritonattn import device as devices
from tritonattn import reference
from tritonattn.errors import ArgumentValueError
from tritonattn.testing import Case, assert_close

H200 = devices.target(90, sm_count=132)

# Offsets that pass 2^31: each axis of each tensor in its turn.


@every_function
def test_attention_offsets_are_64_bits_wide(function, device):
    """vllm PR 47671, 50427: page x stride wrapped in int32; sglang 20389: token x stride did.

    A wrapped offset is a fault of memory, so in a process of its own.  Each tensor has a stride of
    1.2e9 elements on one axis, over memory that nothing else touches; index 2 is past 2^31.
    """
    run_script(
        """
        import sys, torch
        from faults import PAGED, PREFIX, VARLEN, Path

        function, device = sys.argv[1:]
        path, gen = Path(function), torch.Generator().manual_seed(0)

        def ints(*values):
            return torch.tensor(values, dtype=torch.int32, device=device)

        def big(x, axis):
            assert x.shape[axis] == 3
            strides = list(x.stride())
            strides[axis] = 1_200_000_000
            span = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides))
            memory = torch.empty(span, dtype=x.dtype, device=device)
            return memory.as_strided(x.shape, strides).copy_(x)

        q, k, v = torch.randn(3, 3, 3, 16, generator=gen).to(device, torch.float16)
        caches = torch.randn(2, 3, 3, 3, 16, generator=gen).to(device, torch.float16)
        table, lens, cu = ints([2, 0], [1, -1]), ints(5, 3), ints(0, 2, 3)
        tree_mask = torch.ones(3, 3, device=device).tril().bool()
        named = {"q": q, "k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1]}
        rest = {VARLEN: (cu, cu), PREFIX: (table, cu, lens), PAGED: (table, lens)}[function]
        for name in {VARLEN: ("k_cache", "v_cache"), PAGED: ("k", "v")}.get(function, ()):
            del named[name]
        options = {"tree_mask": tree_mask, "out": torch.empty_like(q)}
        options |= {"cu_seqlens_q": cu} if function == PAGED else {}
        right = path(*named.values(), *rest, **options).clone()
        for name, x in [*named.items(), ("out", q), ("tree_mask", tree_mask)]:
            for axis in range(min(x.dim(), 3) - (x.dim() < 4)):
                view = big(x, axis)
                tensors = {**named, name: view} if name in named else named
                changed = options if name in named else {**options, name: view}
                got = path(*tensors.values(), *rest, **changed)
                assert torch.equal(got, right), (name, axis)
                del view, tensors, changed, got
        print("OK")
        """,
        function,
        str(device),
    )


@pytest.mark.parametrize("function", [PREFIX, PAGED])
def test_attention_offsets_into_a_float8_cache_are_64_bits_wide(function, device):
    run_script(
        """
        import sys, torch
        from faults import PREFIX, Path

        function, device = sys.argv[1:]
        path, gen = Path(function), torch.Generator().manual_seed(0)
        memory = torch.empty(2_400_000_000 + 1000, dtype=torch.uint8, device=device)
        shape, strides = (3, 4, 1, 16), (1_200_000_000, 16, 16, 1)
        caches = [memory[512 * i :].as_strided(shape, strides) for i in range(2)]
        for cache in caches:
            values = torch.randn(shape, generator=gen).to(torch.float8_e4m3fn)
            cache.copy_(values.view(torch.uint8))
        caches = [cache.view(torch.float8_e4m3fn) for cache in caches]
        q, k, v = torch.randn(3, 1, 1, 16, generator=gen).to(device, torch.float16)
        table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=device)
        cu, lens = torch.tensor([0, 1, 10], dtype=torch.int32, device=device).split([2, 1])

        def call(*caches):
            if function == PREFIX:
                return path(q, k, v, *caches, table, cu, lens)
            return path(q, *caches, table, lens)

        copies = [x.view(torch.uint8).contiguous().view(x.dtype) for x in caches]
        assert torch.equal(call(*caches), call(*copies))
        print("OK")
        """,
        function,
        str(device),
    )


# Strides


@every_path
def test_attention_of_slices_of_a_fused_projection_equals_a_copy(path, device):
    """TransformerEngine 1195: q, k and v are slices of one tensor, and out is one of another."""
    gen = torch.Generator().manual_seed(0)
    qkv = torch.randn(7, 4 + 2, 16, generator=gen).to(device, path.dtype)
    q, k, v = qkv.split([4, 1, 1], dim=1)
    args, options = case(
        path, (20, 3), (4, 3), heads=(4, 1), head_dims=(16, 16), dtype=path.dtype
    ).build(device)
    if path.function == VARLEN:
        cu = args[3]
        args = (q, k, v, cu, cu)
    elif path.function == PREFIX:
        args = (q, k, v, *args[3:])
    else:
        args = (q, *args[1:])
    out = torch.empty(7, 6, 40, dtype=path.dtype, device=device)[:, 1:5, 8:24]
    result, lse = check(path, args, options | {"out": out})
    whole, whole_lse = check(path, tuple(x.contiguous() for x in args), options)
    if path.small_tiles:  # the same tiles, so the same bits
        assert torch.equal(result, whole)
        assert torch.equal(lse, whole_lse)


def positions(function):
    names = {VARLEN: ("q", "k", "v"), PREFIX: ("q", "k", "v", "k_cache", "v_cache")}
    return [*names.get(function, ("q", "k_cache", "v_cache")), "out"]


@pytest.mark.parametrize(
    ("function", "name"), [(f, name) for f in FUNCTIONS for name in positions(f)]
)
def test_attention_of_a_transposed_tensor_is_right_or_refused(function, name, device):
    """pytorch PR 187506: a last stride that is not 1 was silently taken for 1."""
    args, options = case(Path(function), (9, 5), (2, 1), heads=(16, 16), head_dims=(16, 16)).build(
        device
    )
    args, q = list(args), args[0]
    options["out"] = torch.zeros_like(q)

    def transposed(x):
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    if name == "out":
        options["out"] = transposed(options["out"])
    else:
        i = positions(function).index(name)
        args[i] = transposed(args[i])
    refusal = ""
    try:
        check(Path(function), args, options, poison_out=False)
    except ArgumentValueError as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith(f"{function}: {name} must have stride 1 on its last axis")
        assert not options["out"].any()


# Grids


@every_function
@pytest.mark.parametrize("num_splits", [0, 1, 256])
def test_attention_grid_has_one_axis(function, num_splits):
    """FlashInfer 3125, sglang PR 16043: axes y and z of a grid end at 65535, axis x at 2^31 - 1."""
    batch, heads = 65_536, 8
    ints = torch.zeros(batch + 1, dtype=torch.int32)
    cache = torch.zeros(1, 16, heads, 16, dtype=torch.float16)
    rows = torch.zeros(batch, heads, 16, dtype=torch.float16)
    table = torch.zeros(batch, 1, dtype=torch.int32)
    args = {
        VARLEN: (rows, rows, rows, ints, ints),
        PREFIX: (rows, rows, rows, cache, cache, table, ints, ints[1:]),
        PAGED: (rows, cache, cache, table, ints[1:]),
    }[function]
    scratch_bytes = num_splits * rows.numel() * 4
    if scratch_bytes > 2**33:  # never written here, but not every machine promises that much
        args = tuple(x[:, :1] if x.dim() == 3 else x[:, :, :1] if x.dim() == 4 else x for x in args)
    with recorded(H200) as launches:
        getattr(tritonattn, function)(*args, num_splits=num_splits)
    assert launches
    for launch in launches:
        assert type(launch.grid) is int
        assert 1 <= launch.grid <= 2**31 - 1


@every_function
def test_attention_grid_does_not_grow_with_the_bounds(function, device):
    """max_seqlen 10^6 with 20 keys: a grid by the bounds is 50,000 times too large."""
    args, options = case(Path(function), (20,), (1,)).build(device)
    grids = []
    for bound in (20, 10**6, 2**31 - 1):
        with recorded(H200) as launches:
            getattr(tritonattn, function)(
                *args, **options, max_seqlen_q=bound, max_seqlen_k=bound, num_splits=1
            )
        grids.append([launch.grid for launch in launches])
    assert grids[0] == grids[1] == grids[2]
    check(Path(function), args, options | {"max_seqlen_q": 10**6, "max_seqlen_k": 10**6})


@every_function
def test_attention_grid_is_empty_without_queries(function):
    """A grid of 0 is an error of the driver, so nothing may be launched."""
    args, options = Case(function, (), ()).build()
    with recorded(H200) as launches:
        getattr(tritonattn, function)(*args, **options)
    assert all(type(launch.grid) is int and launch.grid >= 0 for launch in launches)


@pytest.mark.gpu
@every_function
def test_attention_of_65536_sequences_is_right_in_its_last_row(function, device):
    batch = 65_536
    gen = torch.Generator().manual_seed(0)
    shape = {"device": device, "dtype": torch.float16}
    q = torch.randn(batch, 4, 16, generator=gen).to(**shape)
    k, v = torch.randn(2, batch, 2, 16, generator=gen).to(**shape).unbind(0)
    cu = torch.arange(batch + 1, dtype=torch.int32, device=device)
    caches = torch.randn(2, 64, 16, 2, 16, generator=gen).to(**shape).unbind(0)
    table = torch.randint(64, (batch, 2), generator=gen, dtype=torch.int32).to(device)
    lens = torch.randint(0, 33, (batch,), generator=gen, dtype=torch.int32).to(device)
    lens[-1] = 29
    args = {
        VARLEN: (q, k, v, cu, cu),
        PREFIX: (q, k, v, *caches, table, cu, lens),
        PAGED: (q, *caches, table, lens),
    }[function]
    out, lse = Path(function)(*args, return_lse=True)
    last = {
        VARLEN: (q[-3:], k[-3:], v[-3:], cu[:4], cu[:4]),
        PREFIX: (q[-3:], k[-3:], v[-3:], *caches, table[-3:], cu[:4], lens[-3:]),
        PAGED: (q[-3:], *caches, table[-3:], lens[-3:]),
    }[function]
    oracle_of = getattr(reference, function)
    oracle, oracle_lse = oracle_of(*last, return_lse=True)
    fair, fair_lse = oracle_of(*last, return_lse=True, compute_dtype=q.dtype)
    assert_close(out[-3:], oracle, fair, dtype=q.dtype)
    assert_close(lse[:, -3:], oracle_lse, fair_lse, dtype=torch.float32, name="lse")
    assert out.isfinite().all()
