"""vLLM's own layers on the backend: run where vLLM is installed, tried with 0.33.0."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from tritonattn import reference
from tritonattn.testing import assert_close, cumulative

pytest.importorskip("vllm", reason="vLLM is not installed")
import test_vllm_layer as layers


@pytest.fixture(scope="module")
def backend(device):
    if device.type == "cpu":  # of which a vLLM built for CUDA knows nothing; before it is imported
        platforms = importlib.import_module("vllm.platforms")
        platforms._current_platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform()
    with layers.loaded() as module:
        module.register()
        yield module


@pytest.fixture(scope="module")
def config(backend, device):
    """vLLM's configuration without a model, made the current one."""
    vllm_config = importlib.import_module("vllm.config")
    devices = importlib.import_module("vllm.config.device")
    config = vllm_config.VllmConfig(device_config=devices.DeviceConfig(device=device.type))
    with vllm_config.set_current_vllm_config(config), torch.inference_mode():
        yield config


@pytest.mark.parametrize("as_custom_op", [False, True])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_vllm_attention_runs_on_the_backend(backend, config, device, as_custom_op, kv_cache_dtype):
    attention = importlib.import_module("vllm.model_executor.layers.attention").Attention
    context = importlib.import_module("vllm.forward_context").set_forward_context
    sinks = torch.arange(4.0, device=device)
    step = layers.make_step(
        backend, device, padding=2, alibi_slopes=layers.SLOPES, sliding_window=9,
        logits_soft_cap=2.0, sinks=sinks, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    name = f"layer.{as_custom_op}.{kv_cache_dtype}"
    layer = attention(
        4, 32, 0.2, 2, alibi_slopes=layers.SLOPES, logits_soft_cap=2.0, prefix=name,
        per_layer_sliding_window=9, attn_backend=backend.TritonAttnBackend, sinks=sinks,
    ).to(device)  # fmt: skip
    assert layer.backend.get_class() is backend.TritonAttnBackend
    assert layer.impl.options == step.impl.options
    layer.impl.fp8_dtype = step.impl.fp8_dtype  # the configuration has no cache to say so
    layer.use_direct_call, layer.kv_cache = not as_custom_op, step.kv_cache
    rows = [x.flatten(1) for x in (step.query, step.keys, step.values)]
    slots = {name: step.metadata.slot_mapping}
    with context({name: step.metadata}, config, num_tokens=len(rows[0]), slot_mapping=slots):
        out = layer(*rows)
    step.check(out.view(step.query.shape))


def test_vllm_chunked_layers_run_on_the_backend(backend, config, device):
    """vLLM cuts the sequences into virtual ones; the chunk in our own kernels gives the same."""
    chunked = importlib.import_module(
        "vllm.model_executor.layers.attention.chunked_local_attention"
    ).create_chunked_local_attention_backend(backend.TritonAttnBackend, 16)
    common = importlib.import_module("vllm.v1.attention.backend").CommonAttentionMetadata
    step = layers.make_step(backend, device, ((0, 5), (13, 6), (20, 1)))
    m, lens = step.metadata, step.metadata.seq_lens.tolist()
    spec = SimpleNamespace(block_size=layers.BLOCK_SIZE)
    builder = chunked.get_builder_cls()(spec, ["layer"], config, device)
    step.metadata = builder.build(
        0,
        common(
            query_start_loc=m.query_start_loc, query_start_loc_cpu=m.query_start_loc.cpu(),
            seq_lens=m.seq_lens, num_reqs=3, num_actual_tokens=12, max_query_len=6,
            max_seq_len=21, block_table_tensor=m.block_table, slot_mapping=m.slot_mapping,
        ),
    )  # fmt: skip
    out = step.run()
    pages = step.kv_cache.transpose(1, 2)
    tokens = torch.cat([
        pages[m.block_table[b, t // layers.BLOCK_SIZE].long(), t % layers.BLOCK_SIZE]
        for b, t in enumerate(torch.arange(n, device=device) for n in lens)
    ])  # fmt: skip
    oracle, fair = (
        reference.varlen_attention(
            step.query, *tokens.split(layers.DIM, dim=-1), m.query_start_loc,
            cumulative(lens, device), chunk_size=16, softmax_scale=0.2, compute_dtype=dtype,
        )
        for dtype in (torch.float64, torch.float32)
    )  # fmt: skip
    assert_close(out, oracle, fair, dtype=torch.float32)
