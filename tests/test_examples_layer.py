"""examples/attention_layer.py: early vLLM's layer, all that it can do, and a run able to fail."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
early_layer = importlib.import_module("early_layer")
early_steps = importlib.import_module("early_steps")
program = importlib.import_module("attention_layer")

SHOWN = (
    "three prompts in one call, 4 heads on 2, ALiBi and window at once",
    "without a cache",
    "ALiBi past position 257 in bfloat16",
    "cached prefix, head size 72, scale 0.3, ALiBi, window, float8, softcap, sinks",
    "decodes, float8 e5m2 cache",
    "window of 6, blocks before it freed",
    "3 tokens of padding, a call each",
    "3 tokens of padding, one call",
    "nothing is kept on it",
    "2 sequences of other lengths in a batch of 4, the rest 0",
    "head size 50",
    "slice of the model's 6 slopes",
    "copy_blocks",
    "swap_blocks",
    "packed by the old kernels (float16, x = 8)",
    "packed by the old kernels (uint8, x = 16)",
)


def test_attention_layer_shows_every_capability(device, capsys):
    assert program.main(["--device", str(device)]) == 0
    said = capsys.readouterr().out
    assert "FAILED" not in said
    assert [what for what in SHOWN if what not in said] == []
    assert ("a CUDA graph replayed" in said) == (device.type == "cuda")


ALIBI = {"alibi_slopes": program.SLOPES}
DROPPED = [
    ("varlen_attention", "alibi_slopes", ALIBI),
    ("varlen_attention", "window_size", {"sliding_window": 3}),
    ("varlen_attention", "softmax_scale", {}),
    ("prefix_attention", "alibi_slopes", ALIBI),
    ("prefix_attention", "window_size", {"sliding_window": 3}),
    ("prefix_attention", "k_scale", {"kv_cache_dtype": "fp8"}),
    ("prefix_attention", "v_scale", {"kv_cache_dtype": "fp8"}),
    ("paged_attention", "alibi_slopes", ALIBI),
    ("paged_attention", "window_size", {"sliding_window": 3}),
    ("paged_attention", "k_scale", {"kv_cache_dtype": "fp8"}),
    ("write_kv_cache", "v_scale", {"kv_cache_dtype": "fp8"}),
]


@pytest.mark.parametrize(("function", "option", "how"), DROPPED)
def test_attention_layer_check_sees_a_dropped_option(function, option, how, device, monkeypatch):
    real = getattr(early_layer, function)

    def without(*args, **options):
        del options[option]
        return real(*args, **options)

    layer = early_layer.Attention(4, 32, 0.5, 2, device=device, **how)
    prompts = {"varlen_attention": [(0, 9)], "prefix_attention": [(6, 5)]}.get(function, [])
    kv_scale = 0.4 if how.get("kv_cache_dtype") else 1.0
    step = early_steps.make_step(
        layer, prompts, [] if prompts else [7], kv_scale=kv_scale, device=device
    )
    early_steps.check(layer, step)
    monkeypatch.setattr(early_layer, function, without)
    with pytest.raises(AssertionError, match=r"off by|must be exact"):
        early_steps.check(layer, step)


def test_attention_layer_main_fails_where_a_result_is_wrong(device, monkeypatch, capsys):
    def wrong(layer, step, dtype=torch.float64):
        return right(layer, step, dtype) * 1.01

    right = early_steps.plain
    monkeypatch.setattr(early_steps, "plain", wrong)
    monkeypatch.setattr(program, "SHOWS", (program.show_head_sizes, program.show_blocks))
    assert program.main(["--device", str(device)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("FAILED show_head_sizes: out[")
    assert "copy_blocks" in said  # the others run all the same


def test_attention_layer_check_sees_metadata_that_was_changed(device, monkeypatch):
    layer = early_layer.Attention(2, 16, 0.25, device=device)
    step = early_steps.make_step(layer, [], [3], device=device)
    monkeypatch.setattr(
        early_layer, "write_kv_cache", lambda *_, **__: step.metadata.slot_mapping.add_(1)
    )
    monkeypatch.setattr(early_steps, "compare", lambda *_: "")
    with pytest.raises(AssertionError, match="changed slot_mapping of the metadata"):
        early_steps.check(layer, step)


def test_attention_layer_metadata_is_frozen(device):
    layer = early_layer.Attention(2, 16, 0.25, device=device)
    metadata = early_steps.make_step(layer, [], [3], device=device).metadata
    with pytest.raises(AttributeError):
        metadata.attn_bias = None
