"""Writing to a cache and gathering from it, bit for bit against torch.

What a function may not change is compared too: the whole memory that a cache is a view of.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from caches import (
    DIMS,
    E4M3,
    FLOAT8,
    PAGE_SIZES,
    WIDE,
    bits,
    check_write,
    draw_scale,
    every_float8,
    every_wide,
    int32,
    may_overflow,
    memory,
    slots,
)
from faults import run_script
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tritonattn import gather_kv_cache, reference, write_kv_cache
from tritonattn.testing import (
    PACKED_LAYOUTS,
    POOL_LAYOUTS,
    block_table,
    cumulative,
    generator,
    kv_pool,
    normal,
    packed_keys,
)

# Writing


@may_overflow
@every_wide
@given(data=st.data())
def test_write_kv_cache_writes_its_slots_and_nothing_else(
    dtype: torch.dtype, device: torch.device, data: st.DataObject
) -> None:
    gen = generator(data.draw(st.integers(0, 99)))
    dims, heads = data.draw(st.sampled_from(DIMS)), data.draw(st.sampled_from((1, 2, 5)))
    page_size, pages = data.draw(st.sampled_from(PAGE_SIZES)), data.draw(st.integers(1, 9))
    cache_dtype = data.draw(st.sampled_from((dtype, *FLOAT8)))
    layout = data.draw(st.sampled_from(POOL_LAYOUTS))
    how = {"generator": gen, "device": device}
    caches = kv_pool(pages, page_size, heads, *dims, layout, dtype=cache_dtype, **how)
    num_slots = data.draw(st.integers(0, min(40, pages * page_size)))
    chosen = torch.randperm(pages * page_size, generator=gen)[:num_slots]
    chosen[torch.rand(num_slots, generator=gen) < 0.2] = data.draw(st.sampled_from((-1, -77)))
    index_dtype = data.draw(st.sampled_from((torch.int32, torch.int64)))
    rows = num_slots + data.draw(st.integers(0, 3))
    new = packed_keys(
        rows, heads, *dims, data.draw(st.sampled_from(PACKED_LAYOUTS)), dtype=dtype, **how
    )
    scales = {name: draw_scale(data, heads, None, device) for name in ("k_scale", "v_scale")}
    check_write(*new, *caches, chosen.to(device, index_dtype), **scales)


@pytest.mark.parametrize("cache_dtype", [torch.float16, E4M3], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_write_kv_cache_skips_negative_slots(
    index_dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
) -> None:
    """Of slots [3, -1, 7, -1] two are written; neither the last slot nor any other takes -1."""
    k, v = normal(2, 4, 2, 16, dtype=torch.float16, generator=generator(0), device=device)
    caches = torch.full((2, 3, 4, 2, 16), 77.0, device=device).to(cache_dtype).unbind(0)
    check_write(k, v, *caches, slots([3, -1, 7, -1], device, index_dtype))
    for cache in caches:
        changed = cache.float() != 77.0 if cache_dtype != E4M3 else cache.float() != 80.0
        changed = changed.any(-1).any(-1).flatten()
        assert changed.nonzero()[:, 0].tolist() == [3, 7]


def test_write_kv_cache_skips_slots_past_the_end(device: torch.device) -> None:
    pool = torch.zeros(2, 5, 4, 1, 8, device=device)
    caches = pool[:, :3].unbind(0)  # pages 3 and 4 are another's
    k, v = torch.ones(2, 4, 1, 8, device=device)
    write_kv_cache(k, v, *caches, slots([11, 12, 19, 2**40], device))
    written = pool[:, :, :, 0, 0].nonzero().tolist()
    assert written == [[0, 2, 3], [1, 2, 3]]


def test_write_kv_cache_leaves_keys_without_a_slot(device: torch.device) -> None:
    """Of 8 keys, of which a captured graph's padding is NaN, 5 have slots."""
    k, v = normal(2, 8, 2, 16, dtype=torch.float16, generator=generator(0), device=device)
    k[5:], v[5:] = math.nan, math.nan
    caches = torch.full((2, 4, 4, 2, 16), 77.0, dtype=torch.float16, device=device).unbind(0)
    check_write(k, v, *caches, slots([9, 0, 4, 15, 6], device))
    changed = (caches[0] != 77.0).any(-1).any(-1).flatten()
    assert changed.nonzero()[:, 0].tolist() == [0, 4, 6, 9, 15]
    assert not caches[0].isnan().any()


@pytest.mark.parametrize("rows", [0, 3])
def test_write_kv_cache_of_no_slots_writes_nothing(rows: int, device: torch.device) -> None:
    k, v = torch.ones(2, rows, 1, 8, device=device)
    caches = torch.zeros(2, 2, 4, 1, 8, device=device).unbind(0)
    check_write(k, v, *caches, slots([], device))


def test_write_kv_cache_takes_strides_and_never_shapes(device: torch.device) -> None:
    gen = generator(0)
    k, v = normal(2, 6, 2, 16, dtype=torch.float16, generator=gen, device=device)
    mapping = slots([1, 5, 30, 14, 23, 7], device)

    def pool(*shape: int) -> Tensor:
        return normal(*shape, dtype=torch.float16, generator=gen, device=device)

    interleaved = pool(4, 2, 8, 2, 16)
    heads_first = pool(4, 4, 8, 16).transpose(1, 2)
    tokens_outside = pool(8, 4, 2, 2, 16).permute(1, 0, 2, 3, 4)
    for caches in (
        interleaved.unbind(1),
        heads_first.split(2, dim=2),
        tokens_outside.unbind(3),
        (pool(9, 8, 2, 16)[::2][:4], pool(4, 16, 2, 16)[:, 1::2]),
        (pool(4, 8, 2, 19)[..., 3:], pool(4, 8, 3, 17)[:, :, :2, :16]),
    ):
        check_write(k, v, *caches, mapping)


@pytest.mark.parametrize("odd", [1, 7, 10**12])
def test_write_kv_cache_ignores_the_stride_of_a_size_1_axis(odd: int, device: torch.device) -> None:
    memory_of_both = torch.zeros(2, 8 * 16, dtype=torch.float16, device=device)
    k, v = normal(2, 3, 1, 16, dtype=torch.float16, generator=generator(0), device=device)
    k = k.as_strided((3, 1, 16), (16, odd, 1))
    for shape, strides in (
        ((2, 4, 1, 16), (64, 16, odd, 1)),
        ((1, 8, 1, 16), (odd, 16, odd, 1)),
        ((8, 1, 1, 16), (16, odd, odd, 1)),
    ):
        caches = [x.as_strided(shape, strides) for x in memory_of_both.unbind(0)]
        check_write(k, v, *caches, slots([7, 2, 5], device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_write_kv_cache_keeps_all_16_bit_patterns(dtype: torch.dtype, device: torch.device) -> None:
    every = torch.arange(2**16).to(torch.int16).view(dtype).view(64, 2, 512).to(device)
    caches = torch.zeros(2, 4, 16, 2, 512, dtype=dtype, device=device).unbind(0)
    order = torch.randperm(64, generator=generator(0)).to(device)
    write_kv_cache(every, every.flip(0), *caches, order)
    assert torch.equal(bits(caches[0].flatten(0, 1)[order]), bits(every))
    assert torch.equal(bits(caches[1].flatten(0, 1)[order]), bits(every.flip(0)))


def test_write_kv_cache_keeps_32_bit_patterns(device: torch.device) -> None:
    patterns = torch.randint(
        -(2**31), 2**31 - 1, (64, 2, 64), dtype=torch.int32, generator=generator(0)
    )
    patterns[0, 0, :4] = torch.tensor([0x7F800001, 0x7FC12345, -1, -(2**31)], dtype=torch.int32)
    values = patterns.view(torch.float32).to(device)
    caches = torch.zeros(2, 4, 16, 2, 64, device=device).unbind(0)
    write_kv_cache(values, values, *caches, slots(range(64), device))
    for cache in caches:
        assert torch.equal(bits(cache.flatten(0, 1)).cpu(), patterns)


@every_float8
@pytest.mark.parametrize("scale", [None, 1.0, 0.37, 3.0, "tensor", "head"])
def test_write_kv_cache_quantises_every_float16_as_torch(
    scale: Any, dtype: torch.dtype, device: torch.device
) -> None:
    """Nearest even, saturated to the cache's own format; the division is exact before it."""
    every = torch.arange(2**16).to(torch.int16).view(torch.float16)
    every = every.where(every.isfinite(), 0).view(64, 2, 512).to(device)
    if scale == "tensor":
        scale = torch.tensor(0.37, device=device)
    elif scale == "head":
        scale = torch.tensor([0.21, 5.3], device=device)
    caches = torch.zeros(2, 4, 16, 2, 512, device=device).to(dtype).unbind(0)
    check_write(every, every, *caches, slots(range(64), device), k_scale=scale, v_scale=scale)


@every_float8
def test_write_kv_cache_saturates_and_keeps_nan(dtype: torch.dtype, device: torch.device) -> None:
    limit = torch.finfo(dtype).max
    k = torch.tensor([math.inf, -math.inf, math.nan, 1e30, -1e30, 500.0, 1.0625, -0.0])
    k = k.view(1, 1, 8).to(device)
    k_cache, v_cache = torch.zeros(2, 1, 4, 1, 8, device=device).to(dtype).unbind(0)
    write_kv_cache(k, k, k_cache, v_cache, slots([2], device), k_scale=1.0, v_scale=0.5)
    stored = k_cache[0, 2, 0].float().tolist()
    assert math.isnan(stored[2])
    expected = [limit, -limit, limit, -limit, min(limit, 512.0), 1.0, 0.0]
    assert stored[:2] + stored[3:] == expected
    assert v_cache[0, 2, 0, 5:7].float().tolist() == [min(limit, 1024.0), 2.0]


@may_overflow
@every_wide
def test_write_kv_cache_divides_by_a_scale_in_wide_caches(
    dtype: torch.dtype, device: torch.device
) -> None:
    k, v = normal(2, 16, 2, 64, dtype=dtype, generator=generator(0), device=device)
    k[0, 0, :3] = torch.tensor([60_000.0, -60_000.0, 2.0**-24])
    caches = torch.zeros(2, 2, 8, 2, 64, dtype=dtype, device=device).unbind(0)
    k_scale = torch.tensor([0.3, 0.7], device=device)
    check_write(k, v, *caches, slots(range(16), device), k_scale=k_scale, v_scale=3.0)
    check_write(k, v, *caches, slots(range(16), device), k_scale=None, v_scale=0.1)


def test_write_kv_cache_takes_what_requires_grad_where_grad_mode_is_off(
    device: torch.device,
) -> None:
    k, v = torch.ones(2, 1, 1, 8, device=device).unbind(0)
    caches = torch.zeros(2, 1, 2, 1, 8, device=device).unbind(0)
    k.requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            write_kv_cache(k, v, *caches, slots([1], device))
    assert caches[0].sum() == 8


# Gathering


def check_gather(
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_k: Tensor,
    total_k: int,
    **options: Any,
) -> None:
    on_cpu = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in options.items()}
    stored = [x.cpu() for x in (k_cache, v_cache)]
    if k_cache.dtype in FLOAT8 and options.get("out_dtype") is None:
        stored = [bits(x) for x in stored]  # torch packs no float8
    expected = reference.gather_kv_cache(
        *stored, table.cpu(), seq_lens.cpu(),
        cu_seqlens_k=cu_seqlens_k.cpu(), total_k=total_k, **on_cpu,
    )  # fmt: skip
    before = [memory(x).clone() for x in (k_cache, v_cache)]
    actual = gather_kv_cache(
        k_cache, v_cache, table, seq_lens, cu_seqlens_k=cu_seqlens_k, total_k=total_k, **options
    )
    for name, a, e in zip("kv", actual, expected, strict=True):
        assert a.dtype == (options.get("out_dtype") or k_cache.dtype)
        assert a.shape == e.shape
        assert a.device == k_cache.device
        different = bits(a.cpu()) != bits(e)
        assert not different.any(), f"{name}{different.nonzero()[0].tolist()} differs"
    for was, cache in zip(before, (k_cache, v_cache), strict=True):
        assert torch.equal(was, memory(cache))


@every_wide
@given(data=st.data())
def test_gather_kv_cache_packs_the_cached_tokens(
    dtype: torch.dtype, device: torch.device, data: st.DataObject
) -> None:
    gen = generator(data.draw(st.integers(0, 99)))
    dims, heads = data.draw(st.sampled_from(DIMS)), data.draw(st.sampled_from((1, 2, 5)))
    page_size = data.draw(st.sampled_from(PAGE_SIZES))
    lens = tuple(data.draw(st.lists(st.integers(-9, 40), max_size=6)))
    table, pages = block_table(lens, page_size, generator=gen)
    column = torch.arange(table.shape[1]) * page_size
    past = column >= torch.tensor(lens, dtype=torch.int64)[:, None]
    table[past] = data.draw(st.sampled_from((0, -1, 10**6)))  # entries that nothing may follow
    table = table.to(device, data.draw(st.sampled_from((torch.int32, torch.int64))))
    if data.draw(st.booleans()):
        table = torch.stack([table, torch.full_like(table, -1)], 1)[:, 0]  # another row stride
    cache_dtype = data.draw(st.sampled_from((dtype, *FLOAT8)))
    layout = data.draw(st.sampled_from(POOL_LAYOUTS))
    how = {"dtype": cache_dtype, "generator": gen, "device": device}
    caches = kv_pool(pages, page_size, heads, *dims, layout, **how)
    # Sequences may get more rows than they have tokens, or fewer.
    rows = [max(0, n + data.draw(st.sampled_from((0, 0, 3, -3)))) for n in lens]
    total = sum(rows) + data.draw(st.integers(0, 4))
    options: dict[str, Any] = {"out_dtype": data.draw(st.sampled_from((None, *WIDE)))}
    if cache_dtype not in FLOAT8 or options["out_dtype"] is not None:
        for name in ("k_scale", "v_scale"):
            options[name] = draw_scale(data, heads, len(lens), device) if lens else None
    check_gather(*caches, table, int32(lens, device), cumulative(rows, device), total, **options)


def test_gather_kv_cache_follows_scattered_pages(device: torch.device) -> None:
    cache = torch.arange(8 * 4.0, device=device).view(8, 4, 1, 1).repeat(1, 1, 1, 16)
    table = int32([[7, 2, 5]], device)
    k, _ = gather_kv_cache(
        cache, cache, table, int32([10], device), cu_seqlens_k=int32([0, 10], device), total_k=10
    )
    assert k[:, 0, 3].tolist() == [28, 29, 30, 31, 8, 9, 10, 11, 20, 21]


@pytest.mark.parametrize("scale", [None, -1.0, "awkward"])
def test_gather_kv_cache_gives_zeros_where_no_token_is(scale: Any, device: torch.device) -> None:
    """Neither what lies in unused slots nor another sequence's scale reaches a padding row."""
    caches = torch.full((2, 4, 4, 2, 8), math.nan, device=device).unbind(0)
    for cache in caches:
        cache[2, :3] = 1.0
    if scale == "awkward":
        scale = torch.tensor([[math.nan, math.inf], [1.0, -1.0], [-math.inf, math.nan]])
        scale = scale.to(device)
    table = int32([[-1, 10**6], [2, -1], [10**6, -1]], device)
    lens, starts = int32([-9, 3, 0], device), int32([0, 2, 7, 9], device)
    rows = gather_kv_cache(
        *caches, table, lens, cu_seqlens_k=starts, total_k=12, k_scale=scale, v_scale=scale
    )
    owned = torch.zeros(12, dtype=torch.bool)
    owned[2:5] = True
    for x in rows:
        assert (x.cpu()[owned].abs() == 1).all()
        assert (bits(x.cpu()[~owned]) == 0).all()


@may_overflow
@every_float8
@pytest.mark.parametrize("out_dtype", WIDE, ids=str)
def test_gather_kv_cache_decodes_every_byte(
    out_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    codes = torch.arange(256).to(torch.uint8).view(dtype)
    codes = bits(codes).where(codes.float().isfinite(), 0).view(dtype)
    cache = bits(codes).view(2, 4, 2, 16).to(device).view(dtype)
    table, starts = int32([[1, 0], [0, 1]], device), int32([0, 8, 16], device)
    per_sequence = torch.tensor([[0.3, 7.0], [1.0, 1e-3]], device=device)
    for scale in (None, 0.3, per_sequence[0], per_sequence):
        options = {"out_dtype": out_dtype, "k_scale": scale, "v_scale": None}
        check_gather(cache, cache, table, int32([8, 8], device), starts, 16, **options)


@every_float8
def test_gather_kv_cache_gives_float8_bytes_as_they_are(
    dtype: torch.dtype, device: torch.device
) -> None:
    codes = torch.arange(256).to(torch.uint8).view(2, 4, 2, 16)
    cache = codes.to(device).view(dtype)
    k, v = gather_kv_cache(
        cache, cache, int32([[1, 0]], device), int32([8], device),
        cu_seqlens_k=int32([0, 8], device), total_k=8,
    )  # fmt: skip
    assert k.dtype == v.dtype == dtype
    assert torch.equal(bits(k).cpu(), codes[[1, 0]].flatten(0, 1))


def test_gather_kv_cache_finds_the_sequence_among_many(device: torch.device) -> None:
    gen = generator(0)
    lens = torch.randint(-2, 4, (300,), generator=gen).tolist()
    table, pages = block_table(tuple(lens), 2, generator=gen)
    caches = kv_pool(pages, 2, 1, 4, 4, dtype=torch.float16, generator=gen, device=device)
    starts = cumulative([max(0, n) for n in lens], device)
    total = int(starts[-1]) + 5
    check_gather(*caches, table.to(device), int32(lens, device), starts, total)


@pytest.mark.parametrize("total_k", [0, 5])
def test_gather_kv_cache_of_no_sequences_is_zeros(total_k: int, device: torch.device) -> None:
    caches = torch.full((2, 3, 4, 2, 8), math.nan, device=device).unbind(0)
    nothing = int32([], device)
    for start in (0, 3):
        check_gather(*caches, nothing.view(0, 2), nothing, int32([start], device), total_k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gather_kv_cache_returns_what_was_written(dtype: torch.dtype, device: torch.device) -> None:
    gen = generator(0)
    lens, page_size = (5, 0, 17, 1), 8
    total = sum(lens)
    table, pages = block_table(lens, page_size, generator=gen)
    patterns = torch.randint(-(2**15), 2**15, (2, total, 3, 40), dtype=torch.int16, generator=gen)
    k, v = patterns.view(dtype).to(device)
    caches = torch.zeros(2, pages, 3, page_size, 40, dtype=dtype, device=device).transpose(2, 3)
    places = [
        int(table[b, j // page_size]) * page_size + j % page_size
        for b, n in enumerate(lens)
        for j in range(n)
    ]
    write_kv_cache(k, v, *caches, slots(places, device))
    got = gather_kv_cache(
        *caches, table.to(device), int32(lens, device),
        cu_seqlens_k=cumulative(lens, device), total_k=total,
    )  # fmt: skip
    assert torch.equal(bits(got[0]), bits(k))
    assert torch.equal(bits(got[1]), bits(v))


# Offsets beyond 2^31: a wrapped one would crash, so in a process of its own

BIG = """
    import sys
    import torch
    from tritonattn import gather_kv_cache, write_kv_cache

    device, dtype = torch.device(sys.argv[1]), getattr(torch, sys.argv[2])
    far = 1_200_000_000
    # Memory that is not touched costs nothing: three pages of K and V, and three new rows.
    size = (2 * far + 4096) * dtype.itemsize
    pool = torch.empty(size, dtype=torch.uint8, device=device).view(dtype)
    k_cache, v_cache = (pool.as_strided((3, 4, 2, 16), (far, 32, 16, 1), at) for at in (0, 1024))
    values = torch.arange(96, device=device).view(3, 2, 16) % 16
    if dtype == torch.float16:
        rows = pool.as_strided((3, 2, 16), (far, 16, 1), 2048).copy_(values)
    else:
        rows = values.half()
    slots = torch.tensor([1, 7, 10], dtype=torch.int32, device=device)
    write_kv_cache(rows, rows, k_cache, v_cache, slots)
    table = torch.tensor([[2], [1], [0]], dtype=torch.int32, device=device)
    lens = torch.tensor([3, 4, 2], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 3, 7, 9], dtype=torch.int32, device=device)
    packed = gather_kv_cache(
        k_cache, v_cache, table, lens, cu_seqlens_k=starts, total_k=9, out_dtype=torch.float16
    )
    for x in packed:
        assert torch.equal(x[[8, 6, 2]], values.half()), x
    print("OK")
"""


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_write_and_gather_kv_cache_offsets_have_64_bits(dtype: str, device: torch.device) -> None:
    run_script(BIG, device.type, dtype)
