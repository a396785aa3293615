"""The examples that run transformers on this package."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import hf_models
import pytest
from hf_models import needs

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
engine = importlib.import_module("engine")
generate = importlib.import_module("generate")
batching = importlib.import_module("continuous_batching")


@pytest.fixture
def smollm2(monkeypatch):
    """The model is read once for all tests."""
    if sentence := generate.missing():
        pytest.skip(sentence)
    for module in (generate, batching):
        monkeypatch.setattr(module, "load", load_once)


load_once = functools.cache(generate.load)


def test_generate_by_transformers_pads_and_stops_as_eager_does(device):
    model = hf_models.build("llama", device)

    def requests(count: int) -> list[Any]:
        prompts = [[5, 17, 80, 3, 41], [9, 77]]
        return [engine.Request(str(i), p, count) for i, p in enumerate(prompts)]

    first = requests(4)
    generate.generate_with_transformers(model, first)
    assert [generate.compare_with_eager(model, r) for r in first] == [(True, [])] * 2
    assert model.config._attn_implementation == "eager"
    model.generation_config.eos_token_id = first[1].output[1]
    again = requests(4)
    generate.generate_with_transformers(model, again)
    assert again[1].output == first[1].output[:2]
    assert [generate.compare_with_eager(model, r) for r in again] == [(True, [])] * 2


def test_generate_answers_by_transformers_as_eager_does(smollm2, capsys):
    prompt = ["--prompt", "What is the capital of France?", "--system", "Be brief."]
    more = ["--attn", "transformers", "--max-new-tokens", "2", "--check"]
    assert generate.main([*prompt, *more]) == 0
    said = capsys.readouterr().out
    assert "by transformers, in one batch padded on the left" in said
    assert "[1] What is the capital of France?\n    The capital\n" in said
    assert "check [1]: 2 tokens, identical" in said


@needs(5, 19)
def test_continuous_batching_serves_sliding_and_full_layers(capsys):
    assert batching.main(["--model", "hybrid", "--max-new-tokens", "3"]) == 0
    said = capsys.readouterr().out
    for number in (1, 2, 3):
        assert f"check [{number}]: identical to eager" in said
    assert "decoding, mixed; layers that see the last 8 tokens" in said
    assert "decoding, mixed; layers that see all tokens" in said
    assert said.endswith("all answers are those of eager attention\n")


@needs(5, 19)
def test_continuous_batching_sees_wrong_attention(capsys, monkeypatch):
    from tritonattn.integrations import transformers_batching

    real = transformers_batching.varlen_attention
    monkeypatch.setattr(
        transformers_batching, "varlen_attention",
        lambda *args, **how: real(*args, **{**how, "window_size": None}),
    )  # fmt: skip
    assert batching.main(["--model", "hybrid", "--max-new-tokens", "2"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@needs(5, 19)
def test_continuous_batching_serves_smollm2(smollm2, capsys):
    questions = ["--question", "What is the capital of France?", "--question", "Hi"]
    assert batching.main(["--model", "smollm2", *questions, "--max-new-tokens", "2"]) == 0
    said = capsys.readouterr().out
    assert "-> 'The capital'" in said
    assert "check [2]: identical to eager" in said


def test_continuous_batching_asks_for_a_newer_transformers(capsys, monkeypatch):
    monkeypatch.setattr(batching.transformers, "__version__", "5.18.0")
    assert batching.main([]) == 2
    assert "needs transformers 5.19 or later; 5.18.0 is installed" in capsys.readouterr().err
