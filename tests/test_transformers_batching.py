"""Continuous batching of transformers on this package, against one request at a time."""

from __future__ import annotations

from typing import Any

import hf_models
import pytest
import torch
from hf_models import build, integration, ours

from tritonattn.integrations import transformers_batching

transformers: Any = hf_models.transformers
pytestmark = hf_models.needs(5, 19)

NEW = 4
PROMPTS = [list(range(5, 5 + n)) for n in (3, 13, 8)]


def one_by_one(model: Any, config: Any) -> list[list[int]]:
    with torch.no_grad():
        return [
            model.generate(
                torch.tensor([p], device=model.device), generation_config=config,
                attention_mask=torch.ones(1, len(p), dtype=torch.long, device=model.device),
            )[0, len(p) :].tolist()
            for p in PROMPTS
        ]  # fmt: skip


def serve(model: Any, config: Any, **how: Any) -> list[list[int]]:
    """All prompts through ``generate_batch``, in pages of 4 tokens."""
    batching = transformers.ContinuousBatchingConfig(
        page_size=4, num_blocks=64, max_requests_per_batch=4, **how
    )
    results = model.generate_batch(
        PROMPTS, generation_config=config, continuous_batching_config=batching, progress_bar=False
    )
    assert [r.error for r in results.values()] == [None] * len(PROMPTS)
    return [results[key].generated_tokens for key in sorted(results)]


@pytest.fixture
def calls(monkeypatch):
    """How often each way was taken: nothing else may have computed the attention."""
    count = {"varlen_attention": 0, "flash_attn_with_kvcache": 0}
    for name in count:
        real = getattr(transformers_batching, name)

        def counted(*args: Any, name: str = name, real: Any = real, **how: Any) -> Any:
            count[name] += 1
            return real(*args, **how)

        monkeypatch.setattr(transformers_batching, name, counted)
    return count


def greedy() -> Any:
    return transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None
    )


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_generate_batch_equals_one_request_at_a_time(name, device, calls):
    """Prompts are cut where a batch is full; gemma3 and gpt_oss have sliding and full layers."""
    want = one_by_one(build(name, device), greedy())
    model = ours(name, device)
    assert serve(model, greedy(), max_batch_tokens=12, max_blocks_per_request=0) == want
    assert calls["varlen_attention"] >= 2 * NEW
    assert calls["flash_attn_with_kvcache"] == 0
    assert model.config._attn_implementation == integration.NAME


def test_generate_batch_decodes_on_pages(device, calls, monkeypatch):
    """The fast path of decode-only batches, which transformers allows on a GPU alone."""
    from transformers.generation.continuous_batching import initialization

    monkeypatch.setattr(
        initialization, "ensure_decode_fast_path_is_available", lambda *args, **how: None
    )
    want = one_by_one(build("llama", device), greedy())
    got = serve(ours("llama", device), greedy(), max_batch_tokens=32, max_blocks_per_request=8)
    assert got == want
    assert calls["flash_attn_with_kvcache"] >= 2 * (NEW - 1)


def test_a_dropped_window_of_batches_would_be_seen(device, monkeypatch):
    real = transformers_batching.varlen_attention
    monkeypatch.setattr(
        transformers_batching, "varlen_attention",
        lambda *args, **how: real(*args, **{**how, "window_size": None}),
    )  # fmt: skip
    want = one_by_one(build("gemma3", device), greedy())
    model = ours("gemma3", device)
    assert serve(model, greedy(), max_batch_tokens=32, max_blocks_per_request=0) != want


def test_padding_of_a_graph_is_zero_and_harmless(device):
    """Rows past the last sequence, and a last length that comes out negative."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 6, 16, generator=generator).to(device)
    starts_q = torch.tensor([0, 2, 3, 6], dtype=torch.int32, device=device)
    starts_k = torch.tensor([0, 4, 6, 1], dtype=torch.int32, device=device)
    packed = {"cu_seq_lens_q": starts_q, "cu_seq_lens_k": starts_k}
    out, _ = integration.attention(torch.nn.Module(), q, k, v, **packed)
    alone, _ = integration.attention(torch.nn.Module(), q[:, :, :2], k[:, :, :4], v[:, :, :4])
    assert torch.equal(out[:, 3:], torch.zeros_like(out[:, 3:]))
    assert torch.equal(out[:, :2], alone)


def test_transformers_finds_our_functions_for_a_paged_cache():
    from transformers.generation.continuous_batching import initialization

    from tritonattn import flash_attn

    functions, _ = initialization.lazy_import_flash_attention(integration.NAME)
    assert functions[2] is flash_attn.flash_attn_with_kvcache
    asked = initialization.is_flash_attention_requested
    assert asked(requested_attention_implementation=integration.NAME, version=[2, 3])
    assert not asked(requested_attention_implementation="sdpa")
    assert asked(requested_attention_implementation="flash_attention_2")
