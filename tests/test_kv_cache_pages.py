"""Copying the pages of caches, bit for bit against torch.

What a function may not change is compared too: the whole memory that a cache is a view of.
"""

from __future__ import annotations

import math

import pytest
import torch
from caches import E4M3, E5M2, FLOAT8, WIDE, assert_same_memory, bits, memory, slots, twins
from hypothesis import given
from hypothesis import strategies as st

from tritonattn import copy_blocks, swap_blocks
from tritonattn.testing import generator


def test_copy_blocks_counts_pages_on_the_first_axis(device: torch.device) -> None:
    """{0 -> 2, 1 -> 3} in [4, 2, ...], whose second axis is no page."""
    cache = torch.arange(4 * 2 * 3, device=device).view(4, 2, 3).float()
    expected = cache[[0, 1, 0, 1]].clone()
    copy_blocks(cache, slots([0, 2, 1, 3], device).view(2, 2))
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_copy_blocks_reads_all_pages_before_it_writes(
    index_dtype: torch.dtype, device: torch.device
) -> None:
    caches = [torch.arange(5.0, device=device).view(5, 1, 1, 1).repeat(1, 4, 2, 8) for _ in "kv"]
    copy_blocks(caches, slots([0, 1, 1, 2, 2, 0, 3, 3], device, index_dtype).view(4, 2))
    for cache in caches:
        assert cache[:, 0, 0, 0].tolist() == [2, 0, 1, 3, 4]


@pytest.mark.parametrize(
    "dtype", [*WIDE, *FLOAT8, torch.float64, torch.uint8, torch.bool, torch.int64], ids=str
)
@given(data=st.data())
def test_copy_blocks_copies_bytes_and_changes_no_other(
    dtype: torch.dtype, device: torch.device, data: st.DataObject
) -> None:
    gen = generator(data.draw(st.integers(0, 99)))
    pages = data.draw(st.integers(1, 7))
    shape = (pages, *data.draw(st.sampled_from(((4, 2, 8), (2, 3), (5,), ()))))
    num_bytes = 2 * math.prod(shape) * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (num_bytes,), dtype=torch.uint8, generator=gen).to(device)
    wide = raw.view(dtype).view(pages, 2, *shape[1:])  # both caches in one pool
    caches = [wide[:, 0], wide[:, 1]]
    num = data.draw(st.integers(0, pages))
    sources = torch.randint(0, pages, (num,), generator=gen)
    targets = torch.randperm(pages, generator=gen)[:num]
    expected = twins(*caches)
    for twin in expected:
        cells = bits(twin)
        cells[targets] = cells[sources].clone()
    copy_blocks(caches, torch.stack([sources, targets], 1).to(device))
    assert_same_memory(caches, expected)


def test_copy_blocks_takes_one_tensor_a_list_or_none_at_all(device: torch.device) -> None:
    mapping = slots([[0, 1]], device)
    for pack in (lambda x: x, lambda x: [x], lambda x: (x,)):
        cache = torch.arange(3.0, device=device)
        copy_blocks(pack(cache), mapping)
        assert cache.tolist() == [0, 0, 2]
    copy_blocks([], mapping)


def test_swap_blocks_copies_from_one_cache_to_another(device: torch.device) -> None:
    gen = generator(0)
    source = torch.randint(-(2**15), 2**15, (5, 4, 2, 8), dtype=torch.int16, generator=gen)
    source = source.view(torch.bfloat16).to(device)
    pool = torch.full((2, 3, 4, 8, 2), 7.0, dtype=torch.bfloat16, device=device)
    destination = pool[1].transpose(2, 3)
    before, kept = source.clone(), destination.clone()
    swap_blocks(source, destination, slots([[4, 0], [0, 2]], device))
    assert torch.equal(bits(destination.contiguous()[[0, 2]]), bits(source[[4, 0]]))
    assert torch.equal(destination[1], kept[1])
    assert (pool[0] == 7.0).all()
    assert torch.equal(bits(source), bits(before))


def test_swap_blocks_within_one_cache_exchanges_pages(device: torch.device) -> None:
    cache = torch.arange(4.0, device=device).view(4, 1).repeat(1, 3)
    swap_blocks(cache, cache, slots([[0, 3], [3, 0]], device))
    assert cache[:, 0].tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_swap_blocks_of_no_pages_changes_nothing(dtype: torch.dtype, device: torch.device) -> None:
    caches = torch.ones(2, 3, 4, device=device).to(dtype).unbind(0)
    before = memory(caches[0]).clone()
    swap_blocks(*caches, slots([], device).view(0, 2))
    assert torch.equal(memory(caches[0]), before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, E5M2], ids=str)
@pytest.mark.parametrize("mapping_on", ["cpu", "cuda"])
def test_swap_blocks_moves_pages_between_cpu_and_gpu(mapping_on: str, dtype: torch.dtype) -> None:
    on_gpu = torch.randn(5, 4, 2, 8, device="cuda").to(dtype)
    on_cpu = torch.zeros(3, 4, 2, 8).to(dtype).pin_memory()
    original = bits(on_gpu).clone()
    swap_blocks(on_gpu, on_cpu, slots([[4, 0], [1, 2]], mapping_on))
    assert torch.equal(bits(on_cpu)[[0, 2]], original[[4, 1]].cpu())
    assert (bits(on_cpu)[1] == 0).all()
    swap_blocks(on_cpu, on_gpu, slots([[2, 3]], mapping_on))
    assert torch.equal(bits(on_gpu), original[[0, 1, 2, 1, 4]])
