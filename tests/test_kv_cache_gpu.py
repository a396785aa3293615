"""What the cache functions may not do on a GPU: compile for a size, wait, or freeze a length."""

from __future__ import annotations

import pytest
import torch
from caches import E4M3, check_write, int32, slots
from torch import Tensor

from tritonattn import binaries, copy_blocks, gather_kv_cache, swap_blocks, write_kv_cache
from tritonattn.testing import generator, normal


@pytest.mark.gpu
def test_write_and_gather_kv_cache_compile_nothing_for_other_sizes() -> None:
    k, v = torch.randn(2, 40, 2, 64, dtype=torch.float16, device="cuda")

    def call(num: int, pages: int, batch: int, page_size: int) -> None:
        caches = torch.zeros(2, pages, page_size, 2, 64, dtype=torch.float16, device="cuda")
        write_kv_cache(k[:num], v[:num], *caches, slots(range(num), "cuda"))
        table = torch.zeros(batch, pages, dtype=torch.int32, device="cuda")
        lens = int32([1] * batch, "cuda")
        starts = int32(range(batch + 1), "cuda")
        gather_kv_cache(*caches, table, lens, cu_seqlens_k=starts, total_k=batch)

    call(16, 4, 16, 16)
    before = binaries.count()
    for sizes in ((1, 1, 1, 1), (17, 3, 5, 12), (40, 5, 33, 16), (2, 64, 2, 7)):
        call(*sizes)
    assert binaries.count() == before


@pytest.mark.gpu
def test_cache_functions_never_synchronise() -> None:
    k, v = torch.randn(2, 8, 2, 64, dtype=torch.float16, device="cuda")
    caches = torch.zeros(2, 4, 16, 2, 64, device="cuda").to(E4M3).unbind(0)
    mapping, scale = slots(range(8), "cuda"), torch.ones(2, device="cuda")
    table, lens, starts = (int32(x, "cuda") for x in ([[0]], [8], [0, 8]))
    pairs = slots([[0, 1]], "cuda")

    def all_of_them() -> None:
        write_kv_cache(k, v, *caches, mapping, k_scale=scale, v_scale=2.0)
        gather_kv_cache(
            *caches, table, lens, cu_seqlens_k=starts, total_k=8, k_scale=scale,
            out_dtype=torch.float16,
        )  # fmt: skip
        copy_blocks(caches, pairs)
        swap_blocks(caches[0], caches[1], pairs)

    all_of_them()
    torch.cuda.set_sync_debug_mode("error")
    try:
        all_of_them()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_cache_functions_replay_in_a_graph_with_other_slots() -> None:
    gen = generator(0)
    k, v = (normal(4, 2, 64, dtype=torch.float16, generator=gen, device="cuda") for _ in "kv")
    caches = torch.zeros(2, 4, 16, 2, 64, dtype=torch.float16, device="cuda").unbind(0)
    mapping, pairs = slots([0, 1, 2, 3], "cuda"), slots([[0, 1]], "cuda")
    table, lens, starts = (int32(x, "cuda") for x in ([[0, 1]], [4], [0, 4]))

    def step() -> tuple[Tensor, Tensor]:
        write_kv_cache(k, v, *caches, mapping)
        copy_blocks(caches, pairs)
        return gather_kv_cache(*caches, table, lens, cu_seqlens_k=starts, total_k=8)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, _ = step()
    for cache in caches:
        cache.zero_()
    mapping.copy_(slots([33, -1, 35, -1], "cuda"))
    pairs.copy_(slots([[2, 3]], "cuda"))
    table.copy_(int32([[3, 2]], "cuda"))
    starts.copy_(int32([0, 6], "cuda"))
    graph.replay()
    expected = torch.zeros_like(rows)
    expected[1], expected[3] = k[0], k[2]
    assert torch.equal(rows, expected)


@pytest.mark.two_gpus
def test_cache_functions_run_where_their_tensors_are() -> None:
    assert torch.cuda.current_device() == 0
    k, v = torch.randn(2, 4, 2, 64, dtype=torch.float16, device="cuda:1")
    caches = torch.zeros(2, 4, 16, 2, 64, dtype=torch.float16, device="cuda:1").unbind(0)
    check_write(k, v, *caches, slots([3, 60, 17, -1], "cuda:1"))
