"""The vLLM backend's layer on vLLM's cache layouts, against attention over the same tokens."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_stand_in import loaded

from tritonattn import alibi_slopes, reference
from tritonattn.testing import assert_close, block_table, cumulative, generator, normal, same_bytes

# Physical orders of vLLM's logical [L, B, H, N, C]: layers, blocks, heads, tokens, content.
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
HEADS, KV_HEADS, DIM, BLOCK_SIZE = 4, 2, 32, 8


@pytest.fixture(scope="module")
def backend():
    with loaded() as module:
        yield module


@dataclass
class Step:
    """A batch of (cached, new) tokens a request, as vLLM hands it to a layer, and densely."""

    impl: Any
    layer: Any
    metadata: Any
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    kv_cache: torch.Tensor
    pool: torch.Tensor
    oracle: Any  # of compute dtype: what should come out

    def run(self) -> torch.Tensor:
        impl, metadata = self.impl, self.metadata
        slots = metadata.slot_mapping
        impl.do_kv_cache_update(self.layer, self.keys, self.values, self.kv_cache, slots)
        size = (len(self.query), HEADS, self.values.shape[2])
        output = torch.full(size, torch.nan, dtype=self.query.dtype, device=self.query.device)
        args = (self.layer, self.query, self.keys, self.values, self.kv_cache, metadata)
        assert impl.forward(*args, output=output) is output
        return output

    def check(self, out: torch.Tensor | None = None) -> None:
        out = self.run() if out is None else out
        factor = 2.0 if self.impl.fp8_dtype is None else 4.0
        factor = max(factor, 3.0 if self.impl.options["softcap"] else 2.0)
        right, fair = self.oracle(torch.float64), self.oracle(out.dtype)
        assert_close(out, right, fair, dtype=out.dtype, factor=factor)


def make_cache(spec: tuple[int, ...], layout: str, dtype: torch.dtype, device: Any) -> Any:
    """The second of two layers' ``[B, H, N, C]`` view of a pool of NaN, and the pool."""
    order = ["LBHNC".index(axis) for axis in layout]
    sizes = (2, *spec)
    nan = 0x7F if dtype == torch.uint8 else torch.nan
    pool = torch.full([sizes[i] for i in order], nan, dtype=dtype, device=device)
    return pool.permute([order.index(i) for i in range(5)])[1], pool


def make_step(
    backend: Any,
    device: Any,
    requests: tuple[tuple[int, int], ...] = ((0, 5), (13, 6), (20, 1), (0, 1)),
    *,
    dtype: torch.dtype = torch.float32,
    dim: int = DIM,
    dim_v: int = DIM,
    layout: str = "LBNHC",
    padding: int = 0,
    causal: bool = True,
    scales: tuple[Any, Any] = (1.0, 1.0),
    max_query_len: int | None = None,
    **options: Any,
) -> Step:
    impl = backend.TritonAttnImpl(HEADS, dim, 0.2, KV_HEADS, **options)
    lens, new = [sum(r) for r in requests], [n for _, n in requests]
    how = {"generator": generator(0), "device": device}
    tables, blocks = block_table(tuple(lens), BLOCK_SIZE, **how)
    stored = dtype if impl.fp8_dtype is None else torch.uint8
    spec = (blocks, KV_HEADS, BLOCK_SIZE, dim + dim_v)
    kv_cache, pool = make_cache(spec, layout, stored, device)
    k_scale, v_scale = (torch.tensor(s, dtype=torch.float32, device=device) for s in scales)
    layer = SimpleNamespace(_k_scale=k_scale, _v_scale=v_scale)
    dense = [[normal(n, KV_HEADS, d, dtype=dtype, **how) for n in lens] for d in (dim, dim_v)]
    slots = [
        tables[b, t // BLOCK_SIZE].long() * BLOCK_SIZE + t % BLOCK_SIZE
        for b, t in enumerate(torch.arange(n, device=device) for n in lens)
    ]
    for b, (context, _) in enumerate(requests):
        k, v = (x[b][:context] for x in dense)
        impl.do_kv_cache_update(layer, k, v, kv_cache, slots[b][:context])

    def rows(parts: list[torch.Tensor], value: float = 0) -> torch.Tensor:
        last = torch.cat([x[-n:] for x, n in zip(parts, new, strict=True)])
        return torch.cat([last, last.new_full((padding, *last.shape[1:]), value)])

    common = importlib.import_module("vllm.v1.attention.backend").CommonAttentionMetadata(
        query_start_loc=cumulative(new, device),
        query_start_loc_cpu=cumulative(new),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        num_reqs=len(requests),
        num_actual_tokens=sum(new),
        max_query_len=max(new) if max_query_len is None else max_query_len,
        max_seq_len=max(lens),
        block_table_tensor=tables,
        slot_mapping=rows(slots, -1),
        causal=causal,
    )
    builder = backend.TritonAttnMetadataBuilder(
        SimpleNamespace(block_size=BLOCK_SIZE), ["layer"], None, torch.device(device)
    )
    query = normal(sum(new) + padding, HEADS, dim, dtype=dtype, **how)

    def oracle(compute_dtype: torch.dtype) -> torch.Tensor:
        tokens = [torch.cat(x).double() for x in dense]
        if impl.fp8_dtype is not None:
            scaled = zip(dense, (k_scale, v_scale), strict=True)
            tokens = [
                reference.quantise(torch.cat(x), impl.fp8_dtype, s).double()
                * s.double().view(-1, 1)
                for x, s in scaled
            ]
        window = options.get("sliding_window")
        slopes = options.get("alibi_slopes")
        return reference.varlen_attention(
            query, *tokens, common.query_start_loc, cumulative(lens, device),
            softmax_scale=0.2, causal=causal, softcap=options.get("logits_soft_cap") or 0.0,
            window_size=None if window is None else (window - 1, 0), sinks=options.get("sinks"),
            alibi_slopes=None if slopes is None else torch.tensor(slopes, device=device),
            compute_dtype=compute_dtype,
        )  # fmt: skip

    metadata = builder.build(0, common)
    keys, values = (rows(x) for x in dense)
    return Step(impl, layer, metadata, query, keys, values, kv_cache, pool, oracle)


SLOPES = alibi_slopes(HEADS).tolist()
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 9},
    "soft cap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi_slopes": SLOPES},
    "non-causal": {"causal": False},
    "float8": {"kv_cache_dtype": "fp8", "scales": (0.4, 0.7)},
    "float8 e5m2": {"kv_cache_dtype": "fp8_e5m2", "scales": (0.4, 0.7)},
    "float8, scales by head": {"kv_cache_dtype": "fp8", "scales": ([0.4, 0.2], [0.7, 0.9])},
    "head sizes of 72 and 40": {"dim": 72, "dim_v": 40},
    "bfloat16": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_vllm_layer_equals_attention_over_the_same_tokens(backend, device, options):
    make_step(backend, device, **options).check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vllm_layer_takes_every_option_at_once_in_every_layout(backend, device, layout):
    sinks = torch.arange(4, dtype=torch.bfloat16, device=device)
    make_step(
        backend, device, ((13, 6), (20, 1)), layout=layout, padding=3, alibi_slopes=SLOPES,
        sliding_window=9, logits_soft_cap=2.0, sinks=sinks, kv_cache_dtype="fp8_e4m3",
        scales=(0.4, 0.7),
    ).check()  # fmt: skip


def test_vllm_layer_writes_its_slots_and_nothing_else(backend, device):
    step = make_step(backend, device, padding=2)
    step.run()
    written = int(step.metadata.seq_lens.sum()) * KV_HEADS * 2 * DIM
    assert int(step.pool.isfinite().sum()) == written  # the other layer's part is NaN too


def test_vllm_layer_needs_no_bound_on_queries_to_hold(backend, device):
    """A graph captured for decodes may replay a mixed batch: the bound is then too small."""
    make_step(backend, device, max_query_len=1).check()


def test_vllm_layer_takes_the_numpy_bounds_of_chunked_layers(backend, device):
    make_step(backend, device, ((0, 5), (13, 6)), max_query_len=np.int32(6)).check()


def test_vllm_layer_is_batch_invariant_where_vllm_asks_for_it(backend, device, monkeypatch):
    envs = importlib.import_module("vllm.envs")
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
    requests = ((300, 1), (0, 5))
    both = make_step(backend, device, requests)
    assert both.impl.options["batch_invariant"]
    alone = make_step(backend, device, requests[:1])
    for name in ("query", "keys", "values"):
        getattr(alone, name)[:1] = getattr(both, name)[:1]
    used = -(-301 // BLOCK_SIZE)
    theirs, its = (s.metadata.block_table[0, :used].long() for s in (both, alone))
    alone.kv_cache[its] = both.kv_cache[theirs]
    assert same_bytes(both.run()[:1], alone.run())


def test_vllm_layer_of_an_encoder_attends_both_ways_without_a_cache(backend, device):
    requests = ((0, 9), (0, 4))
    step = make_step(backend, device, requests, causal=False, attn_type="encoder_only", padding=2)
    step.kv_cache = torch.empty(0, device=device)
    step.check()


def test_vllm_layer_only_fills_zeros_when_vllm_measures_memory(backend, device):
    step = make_step(backend, device)
    output = torch.full_like(step.query, torch.nan)
    args = (step.layer, step.query, step.keys, step.values, torch.empty(0))
    assert step.impl.forward(*args, None, output=output) is output
    assert not output.any()


def test_vllm_metadata_follows_another_groups_block_table(backend, device):
    step = make_step(backend, device)
    builder = backend.TritonAttnMetadataBuilder(SimpleNamespace(), ["layer"], None, device)
    blocks = len(step.kv_cache)  # the other group's cache: every block one further on
    table = (step.metadata.block_table + 1) % blocks
    slots = (step.metadata.slot_mapping + BLOCK_SIZE) % (blocks * BLOCK_SIZE)
    moved = builder.update_block_table(step.metadata, table, slots)
    assert moved.block_table is table
    assert moved.slot_mapping is slots
    assert moved.seq_lens is step.metadata.seq_lens
    step.kv_cache = step.kv_cache.roll(1, 0)
    step.metadata = moved
    step.check()


@pytest.mark.gpu
def test_vllm_layer_in_a_graph_captured_for_decodes_replays_a_mixed_batch(backend, device):
    captured = make_step(backend, device, ((40, 1),) * 12)
    captured.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.run()
    # Twelve tokens again: of three requests and of nine that are padding.
    other = make_step(backend, device, ((0, 5), (13, 6), (20, 1)))
    a, b = captured.metadata, other.metadata
    a.query_start_loc[:4], a.query_start_loc[4:] = b.query_start_loc, 12
    a.seq_lens.zero_()[:3] = b.seq_lens
    a.slot_mapping.copy_(b.slot_mapping)
    a.block_table.zero_()[:3, : b.block_table.shape[1]] = b.block_table
    captured.kv_cache[: len(other.kv_cache)] = other.kv_cache
    for name in ("query", "keys", "values"):
        getattr(captured, name).copy_(getattr(other, name))
    graph.replay()
    other.check(out)
