"""Padding, tables and pools: memory that other attention kernels read, wrote or misread."""

from __future__ import annotations

import mmap

import pytest
import torch
from faults import (
    FUNCTIONS,
    PAGED,
    PREFIX,
    VARLEN,
    Path,
    arrange,
    check,
    check_case,
    every_cached_path,
    every_path,
    run_script,
)

import tritonattn
from tritonattn.testing import POOL_LAYOUTS, Case, cumulative, same_bytes

SMALL = {"heads": (2, 1), "head_dims": (16, 16)}


def ints(*values, device, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


# What lies past the lengths


@every_path
@pytest.mark.parametrize("poison", ["nan", "inf"])
def test_attention_ignores_what_lies_past_short_sequences(path, poison, device):
    """flash-attention 1745: NaN in a padded cache reaches the result, as 0 x NaN."""
    check_case(path, (1, 3), (1, 1), device, **SMALL, page_size=8, poison=poison)


@every_path
@pytest.mark.parametrize("poison", ["nan", "inf"])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_ignores_the_tail_of_the_last_page(path, poison, causal, device):
    """vllm PR 47305, 44840: read, and multiplied by 0, on one of several load paths."""
    how = {**SMALL, "page_size": 16, "poison": poison, "options": {"causal": causal}}
    check_case(path, (5, 21), (1, 2), device, **how)


@every_cached_path
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_attention_ignores_float8_nan_past_the_lengths(path, cache_dtype, device):
    """The bytes of a recycled float8 page may decode to NaN."""
    how = {**SMALL, "cache_dtype": cache_dtype, "poison": "nan"}
    check_case(path, (5, 21), (1, 2), device, **how, options={"window_size": (9, 0)})


@every_cached_path
def test_attention_ignores_recycled_pages_before_the_window(path, device):
    """Pages that the window has left may belong to others by now, and their ids be anyone's."""
    how = {**SMALL, "page_size": 4, "poison": "inf", "options": {"window_size": (5, 0)}}
    args, options = Case(path.function, (30,), (2,), **how).build(device)
    args[-3 if path.function == PREFIX else -2][0, :4] = 10**6  # tokens 0 to 15
    check(path, args, options)


@every_path
def test_attention_with_chunks_ignores_earlier_chunks(path, device):
    how = {**SMALL, "page_size": 4, "poison": "nan", "options": {"chunk_size": 8}}
    check_case(path, (30, 17), (2, 3), device, **how)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_attention_ignores_values_of_keys_that_no_tree_row_sees(function, device):
    """Drafts that were refused: their keys and values may hold anything."""
    tree = torch.eye(6, dtype=torch.bool, device=device)
    tree[:, 2] = False
    how = {**SMALL, "poison": "nan", "options": {"tree_mask": tree}}
    for small_tiles in (False, True):
        check_case(Path(function, small_tiles=small_tiles), (20,), (6,), device, **how)


# What is read and followed


@pytest.mark.parametrize("function", [PREFIX, PAGED])
def test_attention_follows_no_page_id_past_the_length(function, device):
    """vllm 42494, 53658, flash-attention 2709: a fault of memory, so in a process of its own."""
    run_script(
        """
        import sys, torch
        from faults import PREFIX, Path, _paths, arrange, check
        from tritonattn.testing import generator, normal

        function, device = sys.argv[1:]
        for length, ids in ((17, [3, 1, 10**6, -1]), (32, [3, 1])):
            for path in _paths(function):
                for width, dtype in ((0, torch.int32), (4, torch.int64))[: 2 - path.small_tiles]:
                    gen = generator(0)
                    how = {"dtype": torch.float16, "generator": gen, "device": device}
                    cache_k, cache_v = normal(4, 16, 1, 16, **how), normal(4, 16, 1, 16, **how)
                    table = torch.full((1, len(ids) + width), -(2**31), dtype=dtype, device=device)
                    table[0, : len(ids)] = torch.tensor(ids, dtype=dtype)
                    table = table[:, : len(ids)]  # exactly as wide as the sequence is long
                    lens = torch.tensor([length], dtype=torch.int32, device=device)
                    cu = torch.tensor([0, 1], dtype=torch.int32, device=device)
                    q, k, v = (normal(1, 1, 16, **how) for _ in range(3))
                    if function == PREFIX:
                        args = (q, k, v, cache_k, cache_v, table, cu, lens)
                    else:
                        args = (q, cache_k, cache_v, table, lens)
                    check(path, args, {})
        print("OK")
        """,
        function,
        str(device),
    )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_attention_reads_nothing_past_its_tensors(function, device):
    """Each tensor ends where memory that may not be touched begins: a byte too far is a crash."""
    if device.type != "cpu" or not hasattr(mmap, "PROT_READ"):
        pytest.skip("mprotect guards host memory; tensors are on a GPU here")
    run_script(
        """
        import ctypes, mmap, sys, torch
        import tritonattn
        from faults import _paths, case

        keep, libc = [], ctypes.CDLL(None, use_errno=True)

        def guarded(x):
            size = x.numel() * x.itemsize
            whole = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
            memory = mmap.mmap(-1, whole + mmap.PAGESIZE)
            buffer = (ctypes.c_char * (whole + mmap.PAGESIZE)).from_buffer(memory)
            end = ctypes.addressof(buffer) + whole
            assert libc.mprotect(ctypes.c_void_p(end), mmap.PAGESIZE, 0) == 0
            keep.append((memory, buffer))
            flat = torch.frombuffer(memory, dtype=torch.uint8, count=whole)[whole - size :]
            return flat.view(x.dtype).view(x.shape).copy_(x)

        for path in _paths(sys.argv[1]):
            for tree_mask in (False, True)[: 2 - path.small_tiles]:
                args, options = case(
                    path, (20, 5), (1, 1), heads=(2, 1), head_dims=(24, 40), page_size=5,
                    alibi=2, sinks=True, query_scale=True, tree_mask=tree_mask,
                    kv_scale="[B, Hkv]", out="contiguous",
                ).build()
                args = [guarded(x.contiguous()) for x in args]
                table = [i for i, x in enumerate(args) if x.dim() == 2]
                for i in table:  # without the spare columns
                    args[i] = guarded(args[i][:, :-2].contiguous())
                for name, x in options.items():
                    options[name] = guarded(x) if isinstance(x, torch.Tensor) else x
                assert path(*args, **options).isfinite().all()
        print("OK")
        """,
        function,
    )


@every_cached_path
def test_attention_of_padded_rows_that_keep_old_page_ids_is_zero(path, device):
    """vllm PR 39643: a batch of 4 that shrank to 2; the ids of the other rows are out of date."""
    function = path.function
    q_lens = (1, 1, 1, 1) if function == PAGED else (1, 1, 0, 0)
    rows = {"padding_rows": 2} if function == PREFIX else {}
    args, options = Case(function, (5, 9, 7, 6), q_lens, **SMALL, **rows).build(device)
    args[-1][2:] = 0
    caches = [x.clone() for x in args if x.dim() == 4]
    out, lse = check(path, args, options)
    assert not out[2:].any()
    assert (lse[:, 2:] == -torch.inf).all()
    assert all(map(same_bytes, caches, [x for x in args if x.dim() == 4]))


@every_path
@pytest.mark.parametrize("length", [-1, -9, -(2**31)])
def test_attention_takes_a_negative_length_for_none(path, length, device):
    """transformers' continuous batching: key length -9, cache_seqlens -1 for padding."""
    args, options = Case(path.function, (9, 5), (2, 1), **SMALL).build(device)
    lens = args[-1]
    if path.function == VARLEN:
        if length == -(2**31):
            length = -5
        args = (*args[:-1], ints(0, 5, 5 + length, device=device))
    else:
        lens[1] = length
    before = [x.clone() for x in args]
    out, lse = check(path, args, options)
    if path.function != PREFIX:
        assert not out[2].any()
        assert (lse[:, 2] == -torch.inf).all()
    assert all(map(same_bytes, before, args))


# Pools and their strides


@pytest.mark.parametrize("function", [PREFIX, PAGED])
@pytest.mark.parametrize("layout", POOL_LAYOUTS)
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["16_bits", "float8"])
def test_attention_over_a_view_of_a_pool_equals_a_copy(function, layout, cache_dtype, device):
    """aiter PR 3498, 4531: strides rebuilt from shapes; [N, 2, page, H, D] unbound on 1."""
    how = {"heads": (4, 2), "head_dims": (16, 16), "page_size": 4, "cache_dtype": cache_dtype}
    args, options = Case(function, (9, 5), (1, 1), pool_layout=layout, **how).build(device)
    out, _ = check(Path(function), args, options)
    copies = tuple(x.contiguous() if x.dim() == 4 else x for x in args)
    copied, _ = check(Path(function), copies, options)
    if layout != "sliced":  # whose rows start anywhere, so that they are loaded otherwise
        assert torch.equal(out, copied)


@pytest.mark.parametrize("function", [PREFIX, PAGED])
def test_attention_over_halves_of_a_head_major_pool_equals_a_copy(function, device):
    """aiter PR 4531: ``transpose(1, 2).split`` of a pool that holds K and V of a head together."""
    args, options = Case(function, (9,), (1,), (4, 2), (16, 16), page_size=4).build(device)
    path, at = Path(function), -5 if function == PREFIX else 1
    k_cache, v_cache = args[at : at + 2]
    pool = torch.cat([k_cache, v_cache], dim=-1).transpose(1, 2).contiguous()  # [N, H, page, 2 D]
    halves = pool.transpose(1, 2).split([16, 16], dim=-1)
    views = (*args[:at], *halves, *args[at + 2 :])
    assert torch.equal(path(*views, **options), path(*args, **options))
    pool = torch.cat([k_cache, v_cache], dim=2)  # [N, page, 2 H, D]
    views = (*args[:at], *pool.split([2, 2], dim=2), *args[at + 2 :])
    assert torch.equal(path(*views, **options), path(*args, **options))


@every_path
def test_attention_takes_no_step_along_an_axis_of_size_one(path, device):
    """vllm PR 40737: torch lets an axis of size 1 have any stride, as one KV head's axis does."""
    args, options = Case(path.function, (9,), (1,), **SMALL, page_size=4).build(device)

    def odd(x):
        if not x.is_floating_point():
            return x
        return x.as_strided(
            x.shape, [1 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
        )

    views = tuple(odd(x) for x in args)
    assert any(x.stride() != y.stride() for x, y in zip(views, args, strict=True))
    check(path, views, options)


@every_path
def test_attention_over_scattered_pages_equals_gathered_keys(path, device):
    """FlashInfer 3219: pages that do not follow each other gave zeros."""
    gen = torch.Generator().manual_seed(3)
    caches = torch.randn(2, 8, 4, 2, 16, generator=gen).to(device)
    table, lens = ints([7, 2, 5], device=device), ints(10, device=device)
    cu_q, cu_k = cumulative([2], device), cumulative([10], device)
    q = torch.randn(2, 4, 16, generator=gen).to(device)
    k, v = tritonattn.gather_kv_cache(*caches, table, lens, cu_seqlens_k=cu_k, total_k=10)
    for got, cache in zip((k, v), caches, strict=True):
        assert torch.equal(got, torch.cat([cache[7], cache[2], cache[5, :2]]))
    if path.function == VARLEN:
        args, options = (q, k, v, cu_q, cu_k), {}
    elif path.function == PREFIX:
        args, options = (q, k[8:], v[8:], *caches, table, cu_q, lens - 2), {}
    else:
        args, options = (q, *caches, table, lens), {"cu_seqlens_q": cu_q}
    check(path, args, options)
    gathered = Path(VARLEN, path.num_splits, path.small_tiles)
    if path.function == PAGED and path.small_tiles:  # the same keys in the same tiles
        assert torch.equal(path(*args, **options), gathered(q, k, v, cu_q, cu_k))


@every_path
def test_attention_writes_nothing_but_its_result(path, device):
    """Inputs, pools, tables and what lies beside ``out`` stay as they were."""
    how = {"heads": (2, 1), "head_dims": (24, 24), "layout": "sliced", "pool_layout": "sliced"}
    args, options = Case(path.function, (9, 5), (2, 1), **how, out="sliced").build(device)
    bases = [x if x._base is None else x._base for x in args]
    before = [x.clone() for x in bases]
    check(path, args, options)
    assert all(map(same_bytes, before, bases))


@pytest.mark.parametrize("function", [PREFIX, PAGED])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_attention_over_any_page_equals_the_oracle_when_arranged(function, page_size, device):
    """Lengths just before, on and just after a page's end."""
    path = Path(function, small_tiles=True)
    gen = torch.Generator().manual_seed(0)
    lens = [n + 1 for n in (page_size - 1, page_size, page_size + 1, 4 * page_size)]
    total = sum(lens)
    k, v = torch.randn(2, total, 1, 16, generator=gen)
    q = torch.randn(4, 2, 16, generator=gen)
    args, options = arrange(path, q, k, v, device, q_lens=[1] * 4, k_lens=lens, page_size=page_size)
    check(path, args, options)
