"""transformers' models with ``attn_implementation="tritonattn"`` against its eager attention."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from hf_models import INTERFACE, assert_same_logits, forward, integration, ours, prompts

from tritonattn.errors import ArgumentValueError
from tritonattn.integrations import transformers_masks, transformers_routes

transformers: Any = hf_models.transformers
NEW = 3


def generate(model: Any, batch: dict[str, Any], **how: Any) -> Any:
    with torch.no_grad():
        return model.generate(
            **batch, max_new_tokens=NEW, do_sample=False, output_logits=True,
            return_dict_in_generate=True, **how,
        )  # fmt: skip


def compare_generation(name: str, batch: dict[str, Any], device: Any, **how: Any) -> None:
    """Tokens are eager's, and all steps' logits as near to the truth as eager's."""
    results = []

    def run(model: Any) -> torch.Tensor:
        results.append(generate(model, batch, **how))
        return torch.stack(results[-1].logits).to(model.dtype)

    assert_same_logits(run, ours(name, device), name)
    assert torch.equal(results[0].sequences, results[1].sequences)


@pytest.mark.parametrize("name", INTERFACE)
def test_generate_equals_eager_with_left_padding(name, device):
    compare_generation(name, prompts("left", device), device)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss", "llama4"])
def test_generate_equals_eager_with_a_static_cache(name, device):
    hf_models.skip_static_chunks(name)
    compare_generation(name, prompts("left", device), device, cache_implementation="static")


@pytest.mark.parametrize(
    ("name", "cache"), [("llama", None), ("mistral", "static"), ("llama4", None)]
)
def test_generate_equals_eager_with_padding_between_tokens(name, cache, device):
    """Padding on the right lies between a prompt and its answer; the last row is padding itself.

    There is less of it than a window or a chunk holds, so that this row sees something.
    """
    batch = prompts("right", device, length=8, missing=2)
    compare_generation(name, batch, device, cache_implementation=cache)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "llama4"])
def test_forward_equals_eager_with_right_padding(name, device):
    assert_same_logits(forward(prompts("right", device)), ours(name, device), name)


def test_forward_equals_eager_without_a_mask(device):
    ids = prompts("left", device, missing=0)["input_ids"]
    assert_same_logits(lambda m: m(input_ids=ids).logits, ours("gemma3", device), "gemma3")


def test_forward_equals_eager_for_several_tokens_behind_a_cache(device):
    """A second prompt after a first: more than one query, fewer than keys, left padding."""
    batch = prompts("left", device, length=12)
    ids, mask = batch["input_ids"], batch["attention_mask"]

    def run(model: Any) -> torch.Tensor:
        first = model(input_ids=ids[:, :7], attention_mask=mask[:, :7], use_cache=True)
        cache = {next(k for k in ("cache", "past_key_values") if k in first): first[1]}
        return model(input_ids=ids[:, 7:], attention_mask=mask, **cache).logits

    assert_same_logits(run, ours("mistral", device), "mistral")


# What a dropped option would do: each of these must be seen by the comparisons above.


def drop(monkeypatch: Any, function: str, **changed: Any) -> None:
    real = getattr(transformers_routes, function)
    monkeypatch.setattr(
        transformers_routes,
        function,
        lambda *args, **options: real(*args, **{**options, **changed}),
    )


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("mistral", {"window_size": None}),
        ("mistral", {"window_size": (4, 0)}),
        ("gemma2", {"softcap": 0.0}),
        ("gemma2", {"softmax_scale": None}),
        ("gpt_oss", {"sinks": None}),
        ("gpt_oss", {"window_size": None}),
        ("cohere2", {"window_size": None}),
        ("llama4", {"chunk_size": None}),
    ],
)
def test_a_dropped_option_of_prompts_would_be_seen(name, changed, device, monkeypatch):
    drop(monkeypatch, "varlen_attention", **changed)
    with pytest.raises(AssertionError, match=r"off by .* more than"):
        assert_same_logits(forward(prompts("left", device)), ours(name, device), name)


@pytest.mark.parametrize(
    ("name", "changed"), [("gemma2", {"softcap": 0.0}), ("gpt_oss", {"sinks": None})]
)
def test_a_dropped_option_of_decoding_would_be_seen(name, changed, device, monkeypatch):
    drop(monkeypatch, "paged_attention", **changed)
    with pytest.raises(AssertionError, match=r"off by .* more than"):
        compare_generation(name, prompts("left", device), device)


@pytest.mark.parametrize("queries", ["prompt", "decode"])
def test_dropped_padding_would_be_seen(queries, device, monkeypatch):
    real = transformers_masks.make_mask

    def blind(**given: Any) -> Any:
        drop = (transformers_masks.versions.queries(given)[0] > 1) == (queries == "prompt")
        return real(**{**given, "attention_mask": None if drop else given["attention_mask"]})

    model = ours("llama", device)
    monkeypatch.setitem(
        transformers.AttentionMaskInterface._global_mapping, integration.NAME, blind
    )
    batch = prompts("left", device)
    with pytest.raises(AssertionError, match=r"off by .* more than"):
        assert_same_logits(
            lambda m: torch.stack(generate(m, batch).logits).to(m.dtype), model, "llama"
        )


# Masks and packed sequences.


def test_a_finished_bool_mask_is_honoured(device):
    ids = prompts("left", device, missing=0)["input_ids"]
    seen = torch.rand(1, 1, 9, 9, generator=torch.Generator().manual_seed(3)) < 0.5
    seen = (seen.tril() | torch.eye(9, dtype=torch.bool)).to(device)

    def run(model: Any) -> torch.Tensor:
        mask = seen
        if model.config._attn_implementation == "eager":  # which adds its mask
            least = torch.finfo(model.dtype).min
            mask = torch.zeros_like(seen, dtype=model.dtype).masked_fill(~seen, least)
        return model(input_ids=ids, attention_mask=mask).logits

    assert_same_logits(run, ours("llama", device), "llama")


@pytest.mark.parametrize("told", ["positions", "cu_seq_lens"])
def test_packed_sequences_do_not_see_one_another(told, device):
    ids = prompts("left", device, missing=0)["input_ids"][:1]
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2]], device=device)
    more: dict[str, Any] = {}
    if told == "cu_seq_lens":
        starts = torch.tensor([0, 6, 9], device=device)
        more = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 6,
                "max_length_k": 6}  # fmt: skip

    def run(model: Any) -> torch.Tensor:
        if model.config._attn_implementation == "eager":
            parts = [model(input_ids=ids[:, a:b]).logits for a, b in ((0, 6), (6, 9))]
            return torch.cat(parts, dim=1)
        packed = {"position_ids": positions, "use_cache": False, **more}
        return model(input_ids=ids, **packed).logits

    assert_same_logits(run, ours("mistral", device), "mistral")


def call(device: Any, mask: Any = None, **more: Any) -> Any:
    q, k, v = torch.zeros(3, 2, 3, 4, 16, device=device)
    return integration.attention(torch.nn.Module(), q, k, v, mask, **more)


@pytest.mark.parametrize(
    ("argument", "more"),
    [
        ("attention_mask", {"mask": torch.zeros(2, 1, 4, 4)}),
        ("attention_mask", {"mask": torch.zeros(2, 3, 4, 4, dtype=torch.bool)}),
        ("attention_mask", {"mask": torch.ones(2, 4, dtype=torch.bool)}),
        ("attention_mask", {"mask": torch.ones(2, 1, 4, 5, dtype=torch.bool)}),
        ("attention_mask", {"mask": torch.ones(2, 1, 4, 4, dtype=torch.bool),
                            "cu_seq_lens_q": torch.tensor([0, 8])}),
        ("dropout", {"dropout": 0.1}),
        ("output_attentions", {"output_attentions": True}),
        ("position_bias", {"position_bias": torch.zeros(1, 3, 4, 4)}),
        ("head_mask", {"head_mask": torch.ones(3)}),
        ("block_table", {"block_table": torch.zeros(2, 1), "cu_seq_lens_q": torch.tensor([0, 8])}),
    ],
)  # fmt: skip
def test_attention_refuses_what_it_cannot_do(argument, more, device):
    with pytest.raises(ArgumentValueError, match=rf"transformers: {argument} .*got .*\. \w"):
        call(device, **more)


def test_attention_takes_keys_of_any_strides(device):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 4, 16, generator=generator).to(device)
    module = torch.nn.Module()
    want, _ = integration.attention(module, q, k, v)
    layouts = [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # tokens before heads
        lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),  # dims far apart
        lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),  # sequences innermost
        lambda x: torch.cat([x, x], dim=-1)[..., :16],
    ]
    for layout in layouts:
        got, _ = integration.attention(module, layout(q), layout(k), layout(v))
        assert torch.equal(got, want)
    got, _ = integration.attention(module, q, layouts[0](k), v)
    assert torch.equal(got, want)
    both, _ = integration.attention(module, q, k[:1].expand(2, -1, -1, -1), v)
    alone, _ = integration.attention(module, q[1:], k[:1], v[1:])
    assert torch.equal(both[1:], alone)


def test_the_package_does_not_import_transformers():
    code = (
        "import sys, tritonattn; names = ('transformers', 'tritonattn.integrations'); "
        "sys.exit(any(name.startswith(names) for name in sys.modules))"
    )
    root = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_register_needs_a_supported_transformers(monkeypatch):
    from tritonattn.errors import UnsupportedError
    from tritonattn.integrations import transformers_versions as versions

    monkeypatch.setattr(versions, "version", lambda: (4, 56))
    with pytest.raises(UnsupportedError, match=r"transformers 4\.57 or later; got"):
        integration.register()


def test_attention_runs_between_compiled_graphs(device):
    q, k, v = torch.randn(3, 2, 3, 4, 16, generator=torch.Generator().manual_seed(0)).to(device)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return integration.attention(torch.nn.Module(), q * 2, k, v)[0] * 2

    assert torch.equal(torch.compile(layer, backend="eager")(q, k, v), layer(q, k, v))


def test_forward_equals_eager_where_nothing_may_wait(device, monkeypatch):
    """In a graph that is being captured, left padding is a dense mask: its values are not there."""
    monkeypatch.setattr(transformers_masks, "must_not_wait", lambda tensor: True)
    assert_same_logits(forward(prompts("left", device)), ours("llama4", device), "llama4")


@pytest.mark.parametrize("function", ["register", "patch_alibi"])
def test_examples_in_docstrings_run(function):
    if function == "patch_alibi" and hf_models.versions.version() < (5, 5):
        pytest.skip("needs transformers 5.5 or later")
    found = getattr(integration, function)
    module = sys.modules[found.__module__]
    (example,) = doctest.DocTestFinder(recurse=False).find(found, globs=vars(module).copy())
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.gpu
def test_layers_do_not_wait_for_the_gpu(device):
    q, k, v = torch.randn(3, 2, 3, 9, 16, device=device)
    batch = prompts("left", device)
    given = {
        "batch_size": 2, "kv_length": 9, "kv_offset": 0, "device": q.device,
        "mask_function": transformers.masking_utils.causal_mask_function,
        "attention_mask": batch["attention_mask"].bool(),
        "q_length": 9, "q_offset": 0, "cache_position": None,
    }  # fmt: skip
    module = torch.nn.Module()
    masks = [None, transformers_masks.make_mask(**given)]
    decode = {**given, "q_length": 1, "q_offset": 8}
    for mask in masks:
        integration.attention(module, q, k, v, mask)  # compiles
    integration.attention(module, q[:, :, :1], k, v, transformers_masks.make_mask(**decode))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for mask in masks:
            integration.attention(module, q, k, v, mask)
        mask = transformers_masks.make_mask(**decode)
        integration.attention(module, q[:, :, :1], k, v, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
