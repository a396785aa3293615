"""What flash-attn's functions refuse, in words that name the function and the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tritonattn
from tritonattn import settings
from tritonattn.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

DENSE, VARLEN, KVCACHE = flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
PACKED = (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
EVERY = (DENSE, VARLEN, *PACKED, KVCACHE)
Value, Type = tritonattn.ArgumentValueError, tritonattn.ArgumentTypeError


def halves(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def good(function: Callable[..., Any], device: torch.device) -> dict[str, Any]:
    """Two sequences, 4 query heads of 16 dims, 2 KV heads."""
    return {name: there(x, device) for name, x in on_cpu(function).items()}


def there(x: Any, device: torch.device) -> Any:
    return x.to(device) if isinstance(x, torch.Tensor) else x


def on_cpu(function: Callable[..., Any]) -> dict[str, Any]:
    sums = {"max_seqlen_q": 3, "max_seqlen_k": 3}
    starts = {"cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": ints(0, 3, 5)}
    return {
        DENSE: {"q": halves(2, 3, 4, 16), "k": halves(2, 5, 2, 16), "v": halves(2, 5, 2, 16)},
        VARLEN: {
            "q": halves(5, 4, 16), "k": halves(5, 2, 16), "v": halves(5, 2, 16), **starts, **sums
        },
        flash_attn_kvpacked_func: {"q": halves(2, 3, 4, 16), "kv": halves(2, 5, 2, 2, 16)},
        flash_attn_qkvpacked_func: {"qkv": halves(2, 3, 3, 4, 16)},
        flash_attn_varlen_kvpacked_func: {
            "q": halves(5, 4, 16), "kv": halves(5, 2, 2, 16), **starts, **sums
        },
        flash_attn_varlen_qkvpacked_func: {
            "qkv": halves(5, 3, 4, 16), "cu_seqlens": ints(0, 2, 5), "max_seqlen": 3
        },
        KVCACHE: {
            "q": halves(2, 1, 4, 16),
            "k_cache": halves(2, 8, 2, 16), "v_cache": halves(2, 8, 2, 16),
            "k": halves(2, 1, 2, 16), "v": halves(2, 1, 2, 16), "cache_seqlens": ints(3, 0),
        },
    }[function]  # fmt: skip


def refusal(function: Callable[..., Any], error: type, device: torch.device, **changes: Any) -> str:
    """The message; a refused call has written nothing."""
    args = good(function, device)
    caches = [args[n].clone() for n in ("k_cache", "v_cache") if n in args]
    for name, value in changes.items():
        args[name] = value(args.get(name)) if callable(value) else there(value, device)
    with pytest.raises(error) as caught:
        function(**args)
    written = [args[n] for n in ("k_cache", "v_cache") if isinstance(args.get(n), torch.Tensor)]
    for before, after in zip(caches, written, strict=False):
        assert before.shape != after.shape or torch.equal(before, after)
    return str(caught.value)


def check_refusal(
    function: Any, error: type, name: str, words: str, changes: Any, device: torch.device
) -> None:
    message = refusal(function, error, device, **changes)
    assert message.startswith(f"{function.__name__}: {name} "), message
    assert words in message


@pytest.mark.parametrize("function", EVERY, ids=lambda f: f.__name__)
def test_flash_attn_passes_what_the_refusals_change(function, device):
    function(**good(function, device))


# Everywhere


@pytest.mark.parametrize("function", EVERY[:-1], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("dropout_p", 0.1, Value, "must be 0, as tritonattn only infers"),
        ("deterministic", 1, Type, "must be True or False"),
        ("return_attn_probs", "yes", Type, "must be True or False"),
        ("causal", 1, Type, "must be True or False"),
        ("softcap", -1.0, Value, "of at least 0"),
        ("softmax_scale", "big", Type, "must be a finite float"),
        ("window_size", 5, Type, "must be None or (left, right)"),
        ("attention_chunk", -1, Value, "of at least 0"),
        ("num_splits", -1, Value, "from 0 to 256"),
        ("alibi_slopes", halves(3, dtype=torch.float32), Value, "must be [Hq = 4]"),
        ("sinks", halves(3, dtype=torch.float32), Value, "must be [Hq = 4]"),
    ],
)
def test_flash_attn_refuses_bad_options(function, name, value, error, words, device):
    check_refusal(function, error, name, words, {name: value}, device)


@pytest.mark.parametrize("function", EVERY, ids=lambda f: f.__name__)
def test_flash_attn_refuses_two_names_of_one_argument(function, device):
    sinks = torch.zeros(4)
    message = refusal(function, Value, device, s_aux=sinks, sinks=sinks)
    assert message.startswith(f"{function.__name__}: s_aux must not be given together with sinks")


@pytest.mark.parametrize("function", EVERY, ids=lambda f: f.__name__)
def test_flash_attn_refuses_inputs_that_require_grad(function, device):
    """Training with this package must fail at once, not lose its gradients."""
    for name, value in good(function, device).items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            args = good(function, device)
            args[name] = value.requires_grad_()
            with pytest.raises(Value, match=f"{function.__name__}: .* must not require grad"):
                function(**args)
            with torch.no_grad():
                function(**args)


@pytest.mark.parametrize("function", [DENSE, VARLEN, KVCACHE], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("qv", torch.zeros(1), "must be None"),
        ("pack_gqa", True, "must be None"),
        ("pack_gqa", False, "must be None"),
        ("sm_margin", 2, "must be 0"),
        ("k_descale", torch.zeros(3), "[Hkv = 2] or [B = 2, Hkv = 2]"),
        ("q_descale", torch.zeros(3), "[Hkv = 2] or [B = 2, Hkv = 2]"),
        ("v_descale", torch.zeros(3, 2), "[Hkv = 2] or [B = 2, Hkv = 2]"),
    ],
    ids=repr,
)
def test_flash_attn_refuses_what_it_cannot_do_for_flash_attn_3(
    function, name, value, words, device
):
    check_refusal(function, Value, name, words, {name: value}, device)


# Shapes

SHAPES: list[tuple[Any, type, str, str, dict[str, Any]]] = [
    (DENSE, Value, "q", "[batch, seqlen_q, Hq, D]", {"q": halves(3, 4, 16)}),
    (DENSE, Value, "k", "batch of q", {"k": halves(3, 5, 2, 16)}),
    (DENSE, Value, "k", "D of q", {"k": halves(2, 5, 2, 24)}),
    (DENSE, Value, "v", "seqlen_k of k", {"v": halves(2, 4, 2, 16)}),
    (DENSE, Value, "v", "Hkv of k", {"v": halves(2, 5, 1, 16)}),
    (DENSE, Type, "k", "dtype of q", {"k": lambda x: x.float()}),
    (DENSE, Type, "q", "must be a tensor", {"q": [1.0]}),
    (DENSE, Type, "q", "must be float16, bfloat16 or float32", {"q": lambda x: x.double()}),
    (DENSE, Value, "q", "a multiple of the KV heads", {"q": halves(2, 3, 3, 16)}),
    (DENSE, Value, "k", "on the device of q", {"k": lambda x: x.to("meta")}),
    (VARLEN, Value, "q", "[total_q, Hq, D]", {"q": halves(2, 3, 4, 16)}),
    (VARLEN, Value, "v", "total_k of k", {"v": halves(4, 2, 16)}),
    (VARLEN, Type, "cu_seqlens_q", "int32", {"cu_seqlens_q": lambda x: x.long()}),
    (VARLEN, Value, "cu_seqlens_q", "batch + 1", {"cu_seqlens_q": ints()}),
    (VARLEN, Value, "cu_seqlens_k", "batch + 1", {"cu_seqlens_k": ints(0, 5)}),
    (VARLEN, Type, "cu_seqlens_k", "int32", {"cu_seqlens_k": None}),
    (VARLEN, Type, "seqused_k", "int32", {"seqused_k": torch.zeros(2)}),
    (VARLEN, Value, "seqused_k", "batch of cu_seqlens_q", {"seqused_k": ints(1)}),
    (VARLEN, Value, "seqused_q", "batch of cu_seqlens_q", {"seqused_q": ints(1, 2, 3)}),
    (VARLEN, Value, "block_table", "one row a sequence", {"block_table": ints(0).view(1, 1)}),
    (VARLEN, Value, "k", "4 axes", {"block_table": ints(0, 0).view(2, 1)}),
    (VARLEN, Type, "max_seqlen_q", "an int", {"max_seqlen_q": 3.0}),
    (VARLEN, Value, "block_table", "page_table", {"block_table": ints(0), "page_table": ints(0)}),
    (flash_attn_kvpacked_func, Value, "kv", "2, Hkv, D]", {"kv": halves(2, 5, 3, 2, 16)}),
    (flash_attn_qkvpacked_func, Value, "qkv", "3, H, D]", {"qkv": halves(2, 3, 4, 16)}),
    (flash_attn_varlen_kvpacked_func, Value, "kv", "2, Hkv, D]", {"kv": halves(5, 2, 16)}),
    (flash_attn_varlen_qkvpacked_func, Value, "qkv", "3, H, D]", {"qkv": halves(5, 2, 4, 16)}),
    (flash_attn_varlen_qkvpacked_func, Type, "cu_seqlens", "int32", {"cu_seqlens": [0, 2, 5]}),
    (flash_attn_varlen_qkvpacked_func, Type, "max_seqlen", "an int", {"max_seqlen": 3.0}),
    (KVCACHE, Value, "q", "[batch, seqlen_q, Hq, D]", {"q": halves(2, 4, 16)}),
    (KVCACHE, Value, "k", "Hkv of k_cache", {"k": halves(2, 1, 1, 16)}),
    (KVCACHE, Value, "k", "batch of q", {"k": halves(3, 1, 2, 16)}),
    (KVCACHE, Value, "v", "axis 1 of k", {"v": halves(2, 2, 2, 16)}),
    (KVCACHE, Value, "v", "Dv of v_cache", {"v": halves(2, 1, 2, 24)}),
    (KVCACHE, Value, "k_cache", "D of q", {"q": halves(2, 1, 4, 24)}),
    (KVCACHE, Value, "k_cache", "a row on axis 0 for each of 2", {
        "k_cache": halves(1, 8, 2, 16), "v_cache": halves(1, 8, 2, 16)}),
    (KVCACHE, Value, "k_cache", "stride 1", {"k_cache": lambda x: x.transpose(1, 3)[:, :2],
        "v_cache": lambda x: x[:, :2]}),
    (KVCACHE, Type, "k_cache", "float8", {"k_cache": lambda x: x.float(),
        "v_cache": lambda x: x.float()}),
    (KVCACHE, Value, "k", "given with the other", {"k": None}),
    (KVCACHE, Value, "v", "given with the other", {"v": None}),
    (KVCACHE, Value, "k", "given with the other", {
        "k": None, "v": None, "cu_seqlens_k_new": ints(0, 1, 2)}),
    (KVCACHE, Value, "cache_seqlens", "given with k and v", {"cache_seqlens": None}),
    (KVCACHE, Value, "cache_seqlens", "from 0 to 8", {"cache_seqlens": 9, "k": None, "v": None}),
    (KVCACHE, Value, "cache_seqlens", "from 0 to 7", {"cache_seqlens": 8}),
    (KVCACHE, Type, "cache_seqlens", "must be int32", {"cache_seqlens": lambda x: x.long()}),
    (KVCACHE, Type, "cache_seqlens", "an int", {"cache_seqlens": True}),
    (KVCACHE, Value, "cache_seqlens", "batch of q", {"cache_seqlens": ints(1)}),
    (KVCACHE, Value, "cache_leftpad", "batch of q", {"cache_leftpad": ints(1)}),
    (KVCACHE, Type, "cache_leftpad", "int32", {"cache_leftpad": torch.zeros(2)}),
    (KVCACHE, Value, "cache_batch_idx", "batch of q", {"cache_batch_idx": ints(1)}),
    (KVCACHE, Type, "cache_batch_idx", "int32", {"cache_batch_idx": torch.zeros(2)}),
    (KVCACHE, Value, "block_table", "one row a sequence", {"block_table": ints(0).view(1, 1)}),
    (KVCACHE, Value, "block_table", "2 axes", {"block_table": ints(0, 1)}),
    (KVCACHE, Value, "cu_seqlens_k_new", "batch + 1", {
        "k": halves(2, 2, 16), "v": halves(2, 2, 16), "cu_seqlens_k_new": ints(0, 2)}),
    (KVCACHE, Value, "alibi_slopes", "must be [Hq = 4]", {"alibi_slopes": torch.zeros(3)}),
    (KVCACHE, Type, "causal", "True or False", {"causal": 1}),
    (KVCACHE, Type, "return_softmax_lse", "True or False", {"return_softmax_lse": 1}),
    (KVCACHE, Type, "rotary_interleaved", "True or False", {"rotary_interleaved": 1}),
    (KVCACHE, Value, "scheduler_metadata", "must be None", {"scheduler_metadata": ints(0)}),
    (KVCACHE, Value, "k_descale", "[Hkv = 2]", {"k_descale": torch.ones(2, 2)}),
    (KVCACHE, Value, "cache_leftpad", "a whole number of tokens apart", {
        "cache_leftpad": ints(0, 0),
        "k_cache": lambda x: x.new_zeros(2 * 256 + 8).as_strided(x.shape, (264, 32, 16, 1))}),
]  # fmt: skip


@pytest.mark.parametrize(("function", "error", "name", "words", "changes"), SHAPES)
def test_flash_attn_refuses_bad_tensors(function, error, name, words, changes, device):
    check_refusal(function, error, name, words, changes, device)


COS = torch.ones(8, 4)
ROTARY: list[tuple[type, str, str, dict[str, Any]]] = [
    (Value, "rotary_sin", "together with rotary_cos", {"rotary_cos": COS}),
    (Value, "rotary_cos", "together with rotary_sin", {"rotary_sin": COS}),
    (Value, "rotary_cos", "come with k and v", {
        "rotary_cos": COS, "rotary_sin": COS, "k": None, "v": None}),
    (Value, "rotary_cos", "at most D / 2 = 8", {
        "rotary_cos": torch.ones(8, 9), "rotary_sin": torch.ones(8, 9)}),
    (Value, "rotary_cos", "each of the 8 tokens", {"rotary_cos": COS[:7], "rotary_sin": COS[:7]}),
    (Value, "rotary_sin", "the shape of rotary_cos", {
        "rotary_cos": COS, "rotary_sin": COS[:, :3]}),
    (Type, "rotary_cos", "must be float16", {"rotary_cos": COS.int(), "rotary_sin": COS}),
    (Value, "rotary_cos", "2 axes", {"rotary_cos": COS[0], "rotary_sin": COS[0]}),
    (Value, "rotary_seqlens", "needs rotary_cos", {"rotary_seqlens": ints(0, 1)}),
    (Value, "rotary_seqlens", "batch of q", {
        "rotary_cos": COS, "rotary_sin": COS, "rotary_seqlens": ints(0)}),
    (Value, "rotary_sin", "must not require grad", {
        "rotary_cos": COS, "rotary_sin": COS.clone().requires_grad_()}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "name", "words", "changes"), ROTARY)
def test_flash_attn_with_kvcache_refuses_bad_rotary_arguments(error, name, words, changes, device):
    check_refusal(KVCACHE, error, name, words, changes, device)


def test_flash_attn_with_kvcache_names_a_full_cache_when_values_are_checked(monkeypatch, device):
    monkeypatch.setattr(settings, "CHECK", True)
    message = refusal(KVCACHE, Value, device, cache_seqlens=ints(3, 9), k=None, v=None)
    assert message.startswith("flash_attn_with_kvcache: cache_seqlens must fit the pages")
