"""Bloom, MPT and Falcon, patched, against transformers' own attention."""

from __future__ import annotations

from typing import Any

import hf_models
import pytest
import torch
from hf_models import ALIBI, assert_same_logits, build, forward, integration, ours, prompts
from test_transformers import compare_generation, drop

from tritonattn.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from tritonattn.integrations import (
    transformers_alibi,
    transformers_masks,
    transformers_routes,
    transformers_versions,
)

pytestmark = hf_models.needs(5, 5)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", ALIBI)
def test_forward_equals_their_own_attention(name, padding, device):
    assert_same_logits(forward(prompts(padding, device)), ours(name, device), name)


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ALIBI)
def test_generate_equals_their_own_attention(name, cache, device):
    if (name, cache) == ("falcon", "static"):
        pytest.skip("transformers' own Falcon with ALiBi does not take a static cache")
    compare_generation(name, prompts("left", device), device, cache_implementation=cache)


@pytest.mark.parametrize("name", ["bloom", "falcon"])
def test_positions_do_not_count_padding_between_tokens(name, device):
    compare_generation(name, prompts("right", device, length=5, missing=1), device)


def test_mpt_refuses_padding_between_tokens_behind_a_cache(device):
    batch = prompts("right", device, missing=2)
    with pytest.raises(
        ArgumentValueError, match=r"attention_mask must have its padding at one end"
    ):
        compare_generation("mpt", batch, device)


def test_mpt_refuses_padding_that_it_may_not_look_at(device, monkeypatch):
    for module in (transformers_masks, transformers_alibi):
        monkeypatch.setattr(module, "must_not_wait", lambda tokens: True)
    with pytest.raises(ArgumentValueError, match=r"cannot be looked at in a captured graph"):
        compare_generation("mpt", prompts("left", device), device)


def test_mpt_looks_at_padding_between_compiled_graphs(device):
    """generate() compiles the forward pass by itself where the cache is static, on a GPU alone."""
    batch, model = prompts("left", device), ours("mpt", device)
    how = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
    with torch.no_grad():
        want = ours("mpt", device).generate(**batch, **how)
        model.forward = torch.compile(model.forward, backend="eager")
        assert torch.equal(model.generate(**batch, **how), want)


def test_a_static_cache_of_falcon_gives_the_tokens_of_a_dynamic_one(device):
    batch = prompts("left", device)
    model = ours("falcon", device)
    how = {"max_new_tokens": 3, "do_sample": False}
    with torch.no_grad():
        dynamic = model.generate(**batch, **how)
        static = model.generate(**batch, **how, cache_implementation="static")
    assert torch.equal(dynamic, static)


def test_falcon_without_alibi_equals_its_own_attention(device, monkeypatch):
    *classes, own = hf_models.MODELS["falcon"]
    own = own | {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 1}
    monkeypatch.setitem(hf_models.MODELS, "falcon", (*classes, own))
    assert_same_logits(forward(prompts("left", device)), ours("falcon", device), "falcon")


@pytest.mark.parametrize("name", ALIBI)
def test_dropped_alibi_would_be_seen(name, device, monkeypatch):
    for function in ("varlen_attention", "paged_attention"):
        drop(monkeypatch, function, alibi_slopes=None)
    with pytest.raises(AssertionError, match=r"off by .* more than"):
        assert_same_logits(forward(prompts("left", device)), ours(name, device), name)


def test_falcons_scale_of_alibi_would_be_missed(device, monkeypatch):
    for function in ("varlen_attention", "paged_attention"):
        real = getattr(transformers_routes, function)

        def unscaled(*args: Any, real: Any = real, **options: Any) -> Any:
            slopes = options["alibi_slopes"] / options["softmax_scale"]
            return real(*args, **{**options, "alibi_slopes": slopes})

        monkeypatch.setattr(transformers_routes, function, unscaled)
    with pytest.raises(AssertionError, match=r"off by .* more than"):
        assert_same_logits(forward(prompts("left", device)), ours("falcon", device), "falcon")


def test_dropped_padding_of_bloom_would_be_seen(device, monkeypatch):
    monkeypatch.setattr(transformers_alibi, "_mask", lambda handed: None)
    with pytest.raises(AssertionError, match=r"off by .* more than"):
        assert_same_logits(forward(prompts("left", device)), ours("bloom", device), "bloom")


def test_patch_alibi_leaves_other_models_of_the_class_alone(device):
    other = build("bloom", device)
    batch = prompts("left", device)
    with torch.no_grad():
        want = forward(batch)(other)
        ours("bloom", device)
        assert torch.equal(forward(batch)(other), want)


def test_patch_alibi_refuses_other_models(device):
    with pytest.raises(
        ArgumentTypeError, match=r"model must be a model with BloomAttention.*Llama"
    ):
        integration.patch_alibi(build("llama", device))


def test_patch_alibi_refuses_an_older_transformers(monkeypatch):
    monkeypatch.setattr(transformers_versions, "version", lambda: (5, 4))
    with pytest.raises(UnsupportedError, match=r"needs transformers 5\.5 or later; got 5\.4\."):
        integration.patch_alibi(torch.nn.Module())


def test_patched_models_refuse_attention_weights_and_dropout(device):
    model = ours("bloom", device)
    ids = prompts("left", device)["input_ids"]
    with (
        torch.no_grad(),
        pytest.raises(ArgumentValueError, match="output_attentions cannot be had"),
    ):
        model(input_ids=ids, output_attentions=True)
    model.transformer.h[0].self_attention.attention_dropout.p = 0.1
    with torch.no_grad(), pytest.raises(ArgumentValueError, match="dropout must be 0"):
        model.train()(input_ids=ids)
