"""Tiny random models of transformers whose next token depends on all that attention does."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

import tritonattn.integrations.transformers as integration  # noqa: E402
from tritonattn.integrations import transformers_versions as versions  # noqa: E402
from tritonattn.testing import assert_close  # noqa: E402

integration.register()

VOCABULARY, NO_TOKEN = 96, {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 128, "attn_implementation": "eager", **NO_TOKEN,
}  # fmt: skip
SLIDING_THEN_FULL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
# name: (configuration, model, what differs); windows and chunks are shorter than the prompts
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM",
              {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 4}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM",
              {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM",
               {"sliding_window": 4, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM",
               {**SLIDING_THEN_FULL, "query_pre_attn_scalar": 20}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM",
                {**SLIDING_THEN_FULL, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", {**SLIDING_THEN_FULL, "logit_scale": 1.0}),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM",
               {"intermediate_size_mlp": 64, "attention_chunk_size": 4, "num_local_experts": 2,
                "no_rope_layers": [1, 0], "floor_scale": 4, "moe_layers": []}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "mpt": ("MptConfig", "MptForCausalLM",
            {"d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 64, "use_cache": True}),
    "falcon": ("FalconConfig", "FalconForCausalLM",
               {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3,
                "alibi": True, "multi_query": True}),
}  # fmt: skip
ALIBI = ("bloom", "mpt", "falcon")
INTERFACE = tuple(name for name in MODELS if name not in ALIBI)
# Falcon's eager attention adds ALiBi a second time, its SDPA attention does not.
REFERENCE = {"falcon": "sdpa"}
STRONGER = {"q_proj": 12, "k_proj": 12, "v_proj": 8, "o_proj": 8, "query_key_value": 12,
            "Wqkv": 12, "self_attention.dense": 8, "attn.out_proj": 8}  # fmt: skip


def build(name: str, device: Any = "cpu", attention: str | None = None) -> Any:
    """A model of one of MODELS, the same for every call, with transformers' own attention."""
    config_name, model_name, own = MODELS[name]
    common = {"vocab_size": VOCABULARY, **NO_TOKEN} if name in ALIBI else COMMON
    torch.manual_seed(0)
    asked = attention or REFERENCE.get(name, "eager")
    config = getattr(transformers, config_name)(**{**common, **own, "attn_implementation": asked})
    model = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            for part, factor in STRONGER.items():
                if key.endswith(f"{part}.weight"):
                    weight.mul_(factor)
            if key.endswith("sinks"):
                weight.normal_(std=2.0)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # another one has no float64
    model.generation_config.pad_token_id = 0
    return model.to(device)


def ours(name: str, device: Any = "cpu") -> Any:
    """The same model with this package's attention."""
    model = build(name, device)
    if name in ALIBI:
        return integration.patch_alibi(model)
    model.set_attn_implementation("tritonattn")
    return model


def prompts(padding: str, device: Any = "cpu", length: int = 9, missing: int = 3) -> dict[str, Any]:
    """Two prompts, of which the first is shorter: padded on the "left" or the "right"."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, slice(missing) if padding == "left" else slice(length - missing, length)] = 0
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Models of float64 compute in float64 where their code says float32, such as in the softmax.

    Where float64's least number became -inf in float32, padding would give NaN besides.  Some make
    one factor of a product float32 by another name.
    """
    softmax = torch.nn.functional.softmax

    def wide(x: Any, *args: Any, dtype: Any = None, **how: Any) -> Any:
        return softmax(x, *args, dtype=None if x.dtype == torch.float64 else dtype, **how)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if torch.float64 in (a.dtype, b.dtype):
            a, b = a.double(), b.double()
        return torch.matmul(a, b)

    with (
        mock.patch.object(torch.nn.functional, "softmax", wide),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        mock.patch.object(torch.Tensor, "__matmul__", product),
    ):
        yield


def assert_same_logits(run: Any, model: Any, name: str) -> None:
    """``run(model)``, logits, is as near to the float64 truth as PyTorch's float32 is.

    The truth and the fair error are those of transformers' own attention on the same weights.
    """
    fair = build(name, model.device)
    exact = copy.deepcopy(fair).double()
    with torch.no_grad():
        actual, same_dtype = run(model), run(fair)
        with in_float64():
            oracle = run(exact)
    factor = 3.0 if "softcap" in str(MODELS[name][2]) else 2.0
    assert_close(actual, oracle, same_dtype, dtype=torch.float32, factor=factor, note=name)


def forward(batch: dict[str, Any]) -> Any:
    """Logits of a model at the tokens that are not padding."""
    return lambda model: model(**batch).logits[batch["attention_mask"].bool()]


def skip_static_chunks(name: str) -> None:
    """transformers 5.17 makes no masks of chunks for a static cache: its generate() passes an
    argument that its function for them does not have."""
    masking = versions.masking()
    passed, taken = (
        "block_sequence_ids" in inspect.signature(function).parameters
        for function in (masking.create_masks_for_generate, masking.create_chunked_causal_mask)
    )
    if name == "llama4" and passed and not taken:
        pytest.skip("transformers' own generate() fails for chunks with a static cache")


def needs(*version: int) -> Any:
    text = ".".join(map(str, version))
    return pytest.mark.skipif(
        versions.version() < version, reason=f"needs transformers {text} or later"
    )
