"""What a bad call of a cache function gets.  No kernel runs here."""

# ruff: noqa: E501 -- one case a row

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonattn
from tritonattn import ArgumentTypeError, ArgumentValueError, UnsupportedError, cache_rules
from tritonattn.device import target

TYPE, VALUE = ArgumentTypeError, ArgumentValueError
WRITE, GATHER, COPY, SWAP = "write_kv_cache", "gather_kv_cache", "copy_blocks", "swap_blocks"
E4M3 = torch.float8_e4m3fn


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def good(function: str) -> dict[str, Any]:
    """3 pages of 4 tokens, 2 KV heads, head sizes 16 and 8."""
    k_cache, v_cache = torch.zeros(3, 4, 2, 16).half(), torch.zeros(3, 4, 2, 8).half()
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    if function == WRITE:
        new = {"k": torch.zeros(5, 2, 16).half(), "v": torch.zeros(5, 2, 8).half()}
        return new | caches | {"slot_mapping": torch.tensor([0, 11, -1])}
    if function == GATHER:
        lens = {"block_table": int32([2, 0], [1, 99]), "seq_lens": int32(7, 2)}
        return caches | lens | {"cu_seqlens_k": int32(0, 7, 9), "total_k": 9}
    pairs = torch.tensor([[0, 2], [2, 1]])
    if function == COPY:
        return {"caches": [k_cache, v_cache], "block_mapping": pairs}
    return {
        "source": k_cache,
        "destination": torch.zeros(7, 4, 2, 16).half(),
        "block_mapping": pairs,
    }


def changed(function: str, name: str, change: Any) -> dict[str, Any]:
    call = good(function)
    return call | {name: change(call[name]) if callable(change) else change}


def to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype)


def meta(x: Tensor) -> Tensor:
    return x.to("meta")


def grad(x: Tensor) -> Tensor:
    return x.requires_grad_()


def strided(x: Tensor) -> Tensor:
    """The same shape, every second element."""
    return torch.stack([x, x], -1)[..., 0]


def overlapping(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


def in_caches(i: int, change: Callable[[Tensor], Any]) -> Callable[[list[Tensor]], list[Any]]:
    return lambda caches: [change(c) if j == i else c for j, c in enumerate(caches)]


# Function, argument, change to a good call, error, then what the message says: rule, got, fix.
REFUSED = [
    # write: k, v
    (WRITE, "k", None, TYPE, "k must be a tensor [total_k, Hkv, D]", "None", "Pass k as a torch.Tensor."),
    (WRITE, "k", lambda x: x[0], VALUE, "k must have 3 axes", "float16 [2, 16]", "Reshape k"),
    (WRITE, "k", to(torch.float64), TYPE, "k must be float16, bfloat16 or float32", "float64 [5, 2, 16]", "Pass keys in the model's dtype"),
    (WRITE, "k", to(E4M3), TYPE, "k must be float16, bfloat16 or float32", "float8_e4m3fn", "Pass keys in the model's dtype"),
    (WRITE, "k", strided, VALUE, "k must have stride 1 on its last axis", "strides [64, 32, 2]", "Pass k.contiguous()."),
    (WRITE, "k", meta, VALUE, "k must be on the device of k_cache, cpu", "on meta", "Pass k.to(k_cache.device)."),
    (WRITE, "k", grad, VALUE, "k must not require grad", "requires_grad=True", "torch.no_grad()"),
    (WRITE, "k", lambda x: x[:, :, :8], VALUE, "k must have 16 on axis 2 (D of k_cache)", "float16 [5, 2, 8]", "Pass new keys"),
    (WRITE, "v", lambda x: x[:4], VALUE, "v must have 5 on axis 0 (total_k of k)", "float16 [4, 2, 8]", "one value row for each key row"),
    (WRITE, "v", lambda x: x[:, :1], VALUE, "v must have 2 on axis 1 (Hkv of k)", "float16 [5, 1, 8]", "same KV heads"),
    (WRITE, "v", lambda x: x[:, :, :4], VALUE, "v must have 8 on axis 2 (Dv of v_cache)", "float16 [5, 2, 4]", "Pass new keys"),
    (WRITE, "v", to(torch.float32), TYPE, "v must have the dtype of k, float16", "float32", "Pass v.to(k.dtype)."),
    (WRITE, "v", grad, VALUE, "v must not require grad", "requires_grad=True", "v.detach()"),
    # write: caches
    (WRITE, "k_cache", None, TYPE, "k_cache must be a tensor [num_pages, page_size, Hkv, D]", "None", "Pass k_cache"),
    (WRITE, "k_cache", lambda x: x.flatten(0, 1), VALUE, "k_cache must have 4 axes", "float16 [12, 2, 16]", "Permute k_cache"),
    (WRITE, "k_cache", strided, VALUE, "k_cache must have stride 1 on its last axis", "strides", "Pass a view of k_cache"),
    (WRITE, "k_cache", to(torch.float32), TYPE, "v_cache must have the dtype of k_cache, float32", "float16", "Pass v_cache.to"),
    (WRITE, "k_cache", lambda x: x[:, :0], VALUE, "v_cache must have 0 on axis 1", "float16 [3, 4, 2, 8]", "same pages"),
    (WRITE, "k_cache", overlapping, VALUE, "k_cache must have its own memory for every entry", "strides [0,", "Pass k_cache.contiguous()"),
    (WRITE, "k_cache", grad, VALUE, "k_cache must not require grad", "requires_grad=True", "k_cache.detach()"),
    (WRITE, "v_cache", lambda x: x[:2], VALUE, "v_cache must have 3 on axis 0 (num_pages of k_cache)", "float16 [2, 4, 2, 8]", "same pages"),
    (WRITE, "v_cache", overlapping, VALUE, "v_cache must have its own memory", "strides [0,", "torch.empty"),
    # write: slot_mapping
    (WRITE, "slot_mapping", [0, 1], TYPE, "slot_mapping must be a tensor int32 or int64 [n]", "list [0, 1]", "Pass torch.tensor(slot_mapping)"),
    (WRITE, "slot_mapping", to(torch.float32), TYPE, "slot_mapping must be int32 or int64", "float32 [3]", "Pass slot_mapping.long()."),
    (WRITE, "slot_mapping", lambda x: x[None], VALUE, "slot_mapping must have 1 axis, [n]", "int64 [1, 3]", "Pass slot_mapping.flatten()."),
    (WRITE, "slot_mapping", lambda x: x.repeat(2)[::2], VALUE, "slot_mapping must have stride 1", "strides [2]", "Pass slot_mapping.contiguous()."),
    (WRITE, "slot_mapping", meta, VALUE, "slot_mapping must be on the device of k_cache, cpu", "on meta", "Pass slot_mapping.to"),
    (WRITE, "slot_mapping", lambda x: x.repeat(2), VALUE, "slot_mapping must have at most 5 entries, the rows of k", "int64 [6]", "Pass slot_mapping[:5]"),
    # write and gather: scales
    (WRITE, "k_scale", "2", TYPE, "k_scale must be a finite float or a float32 tensor", "str '2'", "Pass a Python number"),
    (WRITE, "k_scale", True, TYPE, "k_scale must be a finite float or a float32 tensor", "bool True", "Pass a Python number"),
    (WRITE, "k_scale", math.nan, VALUE, "k_scale must be a finite float", "got nan", "Pass a k_scale that is finite"),
    (WRITE, "v_scale", torch.ones(3), VALUE, "v_scale must be a float or float32 [], [1], [Hkv = 2]", "float32 [3]", "Reshape v_scale"),
    (WRITE, "v_scale", torch.ones(2, 2), VALUE, "v_scale must be a float or float32 [], [1], [Hkv = 2]", "float32 [2, 2]", "Reshape v_scale"),
    (WRITE, "v_scale", torch.ones(2).half(), TYPE, "v_scale must be a float or float32", "float16 [2]", "Pass v_scale.float()."),
    (WRITE, "v_scale", torch.ones(2, device="meta"), VALUE, "v_scale must be on the device of k_cache, cpu", "on meta", "Pass v_scale.to"),
    (WRITE, "v_scale", torch.ones(2, requires_grad=True), VALUE, "v_scale must not require grad", "requires_grad=True", "v_scale.detach()"),
    (GATHER, "k_scale", torch.ones(3, 2), VALUE, "k_scale must be a float or float32 [], [1], [Hkv = 2] or [B = 2, Hkv = 2]", "float32 [3, 2]", "Reshape k_scale"),
    # gather
    (GATHER, "k_cache", None, TYPE, "k_cache must be a tensor [num_pages, page_size, Hkv, D]", "None", "Pass k_cache"),
    (GATHER, "k_cache", to(torch.int8), TYPE, "v_cache must have the dtype of k_cache, int8", "float16", "Pass v_cache.to"),
    (GATHER, "k_cache", grad, VALUE, "k_cache must not require grad", "requires_grad=True", "k_cache.detach()"),
    (GATHER, "block_table", to(torch.float32), TYPE, "block_table must be int32 or int64 [batch, max_pages]", "float32 [2, 2]", "Pass block_table.int()."),
    (GATHER, "block_table", lambda x: x[:1], VALUE, "block_table must have 2 on axis 0", "int32 [1, 2]", "one row of page ids"),
    (GATHER, "seq_lens", to(torch.int64), TYPE, "seq_lens must be int32 [B]", "int64 [2]", "Pass seq_lens.int()."),
    (GATHER, "seq_lens", lambda x: x[None], VALUE, "seq_lens must have 1 axis", "int32 [1, 2]", "Reshape seq_lens"),
    (GATHER, "cu_seqlens_k", to(torch.int64), TYPE, "cu_seqlens_k must be int32 [B + 1]", "int64 [3]", "Pass cu_seqlens_k.int()."),
    (GATHER, "cu_seqlens_k", lambda x: x[1:], VALUE, "cu_seqlens_k must have 3 entries (B + 1, B = 2 of seq_lens)", "int32 [2]", "Pass the prefix sums"),
    (GATHER, "cu_seqlens_k", meta, VALUE, "cu_seqlens_k must be on the device of k_cache, cpu", "on meta", "Pass cu_seqlens_k.to"),
    (GATHER, "total_k", -1, VALUE, "total_k must be an int from 0", "got -1", "Pass total_k"),
    (GATHER, "total_k", torch.tensor(9), TYPE, "total_k must be an int from 0", "a tensor, int64 []", "never read from a device"),
    (GATHER, "out_dtype", torch.float64, TYPE, "out_dtype must be None, float16, bfloat16 or float32", "torch.float64", "Pass the model's dtype."),
    (GATHER, "out_dtype", E4M3, TYPE, "out_dtype must be None, float16, bfloat16 or float32", "torch.float8_e4m3fn", "Pass the model's dtype."),
    # copy
    (COPY, "caches", 3, TYPE, "caches must be a tensor [num_pages, ...] or a list of them", "got 3", "Pass [k_cache, v_cache]."),
    (COPY, "caches", in_caches(1, lambda _: None), TYPE, "caches[1] must be a tensor [num_pages, ...]", "None", "Pass caches[1]"),
    (COPY, "caches", in_caches(0, lambda _: torch.tensor(1.0)), VALUE, "caches[0] must have at least one axis", "float32 []", "first axis counts pages"),
    (COPY, "caches", in_caches(1, to(torch.complex128)), TYPE, "caches[1] must have entries of 1, 2, 4 or 8 bytes", "complex128", "Pass a real dtype."),
    (COPY, "caches", in_caches(1, overlapping), VALUE, "caches[1] must have its own memory for every entry", "strides [0,", "Pass caches[1].contiguous()"),
    (COPY, "caches", in_caches(1, grad), VALUE, "caches[1] must not require grad", "requires_grad=True", "caches[1].detach()"),
    (COPY, "caches", in_caches(1, meta), VALUE, "block_mapping must be on the device of caches[1], meta", "on cpu", "Pass block_mapping.to(caches[1].device)."),
    (COPY, "block_mapping", {0: 2}, TYPE, "block_mapping must be a tensor int32 or int64 [n, 2] of (source page, destination page)", "dict {0: 2}", "Pass block_mapping as"),
    (COPY, "block_mapping", to(torch.float32), TYPE, "block_mapping must be int32 or int64", "float32 [2, 2]", "Pass block_mapping.long()."),
    (COPY, "block_mapping", lambda x: x.flatten(), VALUE, "block_mapping must have 2 axes", "int64 [4]", "Reshape block_mapping"),
    (COPY, "block_mapping", lambda x: x[:, :1], VALUE, "block_mapping must have 2 on axis 1 (source and destination)", "int64 [2, 1]", "Pass one row"),
    # swap
    (SWAP, "source", None, TYPE, "source must be a tensor [num_pages, ...]", "None", "Pass source"),
    (SWAP, "source", grad, VALUE, "source must not require grad", "requires_grad=True", "source.detach()"),
    (SWAP, "destination", to(torch.float32), TYPE, "destination must have the dtype of source, float16", "float32", "Pass destination.to(source.dtype)."),
    (SWAP, "destination", lambda x: x[:, :2], VALUE, "destination must have the page shape of source, [4, 2, 16]", "float16 [7, 2, 2, 16]", "Only the number of pages may differ."),
    (SWAP, "destination", overlapping, VALUE, "destination must have its own memory for every entry", "strides [0,", "destination.contiguous()"),
    (SWAP, "block_mapping", meta, VALUE, "block_mapping must be on the device of source, cpu", "on meta", "Pass block_mapping.to(source.device)."),
    (SWAP, "block_mapping", lambda x: x[0], VALUE, "block_mapping must have 2 axes", "int64 [2]", "Reshape block_mapping"),
]  # fmt: skip


def refused(
    function: str, call: dict[str, Any], error: type[Exception], rule: str, got: str, fix: str
) -> None:
    with pytest.raises(error) as caught:
        getattr(tritonattn, function)(**call)
    message = str(caught.value)
    assert message.startswith(f"{function}: {rule}"), message
    came = message.split("; got ")[1]
    assert got.removeprefix("got ") in came, message
    assert fix in came, message


@pytest.mark.parametrize(("function", "name", "change", "error", "rule", "got", "fix"), REFUSED)
def test_cache_functions_refuse_bad_calls(
    function: str, name: str, change: Any, error: type[Exception], rule: str, got: str, fix: str
) -> None:
    call = good(function)
    if not name.endswith("_scale") and name != "out_dtype":
        assert name in call
        call = changed(function, name, change)
    else:
        call[name] = change
    refused(function, call, error, rule, got, fix)


def test_write_kv_cache_refuses_a_cache_of_another_width() -> None:
    call = good(WRITE)
    call["k_cache"], call["v_cache"] = call["k_cache"].float(), call["v_cache"].float()
    rule = "k_cache must be float16, float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz"
    refused(WRITE, call, TYPE, rule, "float32 [3, 4, 2, 16]", "Pass a cache of k's dtype")


def test_write_kv_cache_refuses_pages_without_tokens() -> None:
    call = good(WRITE)
    call["k_cache"], call["v_cache"] = call["k_cache"][:, :0], call["v_cache"][:, :0]
    refused(WRITE, call, VALUE, "k_cache must have page_size >= 1", "[3, 0, 2, 16]", "Allocate")


def test_write_kv_cache_refuses_other_heads_than_the_caches() -> None:
    call = good(WRITE)
    call["k"], call["v"] = call["k"][:, :1], call["v"][:, :1]
    rule = "k must have 2 on axis 1 (Hkv of k_cache)"
    refused(WRITE, call, VALUE, rule, "float16 [5, 1, 16]", "Pass new keys and values")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64], ids=str)
def test_gather_kv_cache_refuses_caches_that_attention_cannot_read(dtype: torch.dtype) -> None:
    call = good(GATHER)
    call["k_cache"], call["v_cache"] = call["k_cache"].to(dtype), call["v_cache"].to(dtype)
    rule = "k_cache must be float16, bfloat16, float32, float8_e4m3fn"
    refused(GATHER, call, TYPE, rule, str(dtype).removeprefix("torch."), "Pass a cache of a dtype")


def test_gather_kv_cache_wants_a_dtype_for_scaled_float8() -> None:
    call = good(GATHER) | {"v_scale": 2.0}
    call["k_cache"], call["v_cache"] = call["k_cache"].to(E4M3), call["v_cache"].to(E4M3)
    rule = "out_dtype must be given for a float8 cache with a scale"
    refused(GATHER, call, VALUE, rule, "None", "Pass out_dtype=torch.bfloat16")


@pytest.mark.parametrize(
    ("function", "names"),
    [(WRITE, ("k", "v", "k_cache", "v_cache")), (GATHER, ("k_cache", "v_cache"))],
)
def test_cache_functions_refuse_bfloat16_where_the_gpu_has_none(
    function: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tritonattn.device.describe", lambda _: target(75, name="Tesla T4"))
    call = good(function)
    call |= {name: call[name].bfloat16() for name in names}
    rule = f"{names[0]} may be bfloat16 only on a GPU of sm_80 or later"
    refused(function, call, UnsupportedError, rule, "bfloat16 on Tesla T4 (sm_75)", ".half()")


def test_gather_kv_cache_refuses_a_bfloat16_result_where_the_gpu_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tritonattn.device.describe", lambda _: target(75, name="Tesla T4"))
    call = good(GATHER) | {"out_dtype": torch.bfloat16}
    rule = "out_dtype may be bfloat16 only on a GPU of sm_80 or later"
    refused(GATHER, call, UnsupportedError, rule, "bfloat16 on Tesla T4 (sm_75)", "float16")


# A write that passed once is known by its facts


def test_write_kv_cache_remembers_no_more_than_what_passed(device: torch.device) -> None:
    call = good(WRITE)
    call = {name: x.to(device) for name, x in call.items()}
    cache_rules._passed.clear()
    with torch.no_grad():
        for scale in (None, 1.0, 1.0):
            tritonattn.write_kv_cache(**call, k_scale=scale)
        assert len(cache_rules._passed) == 2
        for name, change, error in (
            ("k_scale", True, TYPE),  # equal to 1.0
            ("k_scale", math.nan, VALUE),
            ("k", call["k"].cpu().tolist(), TYPE),
            ("k", call["k"][:, :, :8], VALUE),
            ("slot_mapping", call["slot_mapping"].repeat(2), VALUE),
            ("v", call["v"].double(), TYPE),
        ):
            for _ in range(2):
                with pytest.raises(error):
                    tritonattn.write_kv_cache(**call | {name: change})
        assert len(cache_rules._passed) == 2
    call["k"].requires_grad_()
    with pytest.raises(VALUE, match="k must not require grad"):
        tritonattn.write_kv_cache(**call)


# Values, looked at only when asked


WRONG_VALUES = [
    (WRITE, "slot_mapping", torch.tensor([3, -5, 12, 99]), "slot_mapping must be below 12, num_pages * page_size of k_cache", "slot_mapping[2] is 12", "negative slot skips"),
    (WRITE, "slot_mapping", int32(2**31 - 1), "slot_mapping must be below 12", "slot_mapping[0] is 2147483647", "page * page_size + offset"),
    (GATHER, "block_table", int32([2, 3], [1, 99]), "block_table must hold page ids from 0 to 2", "block_table[0, 1] is 3", "Pass ids below num_pages"),
    (GATHER, "block_table", int32([2, 0], [-1, 99]), "block_table must hold page ids from 0 to 2", "block_table[1, 0] is -1", "Pass ids below num_pages"),
    (GATHER, "cu_seqlens_k", int32(0, 7, 6), "cu_seqlens_k must start at 0, never decrease", "cu_seqlens_k[2] is 6 after 7", "Pass the prefix sums"),
    (GATHER, "cu_seqlens_k", int32(1, 7, 9), "cu_seqlens_k must start at 0", "cu_seqlens_k[0] is 1", "Pass the prefix sums"),
    (GATHER, "cu_seqlens_k", int32(0, 7, 10), "cu_seqlens_k must start at 0, never decrease and end at or before 9 (total_k)", "cu_seqlens_k[2] is 10", "Pass the prefix sums"),
    (COPY, "block_mapping", torch.tensor([[0, 1], [3, 2]]), "block_mapping must hold page ids from 0 to 2 of caches[0]", "block_mapping[1, 0] is 3", "Pass page ids."),
    (COPY, "block_mapping", int32([0, 1], [1, -1]), "block_mapping must hold page ids from 0 to 2 of caches[0]", "block_mapping[1, 1] is -1", "Pass page ids."),
    (COPY, "block_mapping", torch.tensor([[0, 1], [1, 2], [2, 1]]), "block_mapping must not have one destination twice", "block_mapping[2, 1] is 1, as is block_mapping[0, 1]", "Keep the copy"),
    (SWAP, "block_mapping", torch.tensor([[2, 6], [3, 1]]), "block_mapping must hold page ids from 0 to 2 of source", "block_mapping[1, 0] is 3", "Pass page ids."),
    (SWAP, "block_mapping", torch.tensor([[2, 7]]), "block_mapping must hold page ids from 0 to 6 of destination", "block_mapping[0, 1] is 7", "Pass page ids."),
]  # fmt: skip


@pytest.mark.parametrize(("function", "name", "values", "rule", "got", "fix"), WRONG_VALUES)
def test_cache_functions_check_values_where_that_is_asked(
    function: str,
    name: str,
    values: Tensor,
    rule: str,
    got: str,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tritonattn.settings.CHECK", True)
    call = good(function) | {name: values}
    refused(function, call, VALUE, rule, got, fix)


@pytest.mark.parametrize("function", [WRITE, GATHER, COPY, SWAP])
def test_cache_functions_check_only_what_is_followed(
    function: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative slots, entries past a length and padding sequences are right."""
    monkeypatch.setattr("tritonattn.settings.CHECK", True)
    call = good(function)
    if function == GATHER:
        call["block_table"] = int32([2, 0], [1, 99], [-1, -1])
        call["seq_lens"] = int32(7, 2, -9)
        call["cu_seqlens_k"] = int32(0, 7, 9, 9)
    on_device = {
        name: [c.to(device) for c in x]
        if isinstance(x, list)
        else x.to(device)
        if isinstance(x, Tensor)
        else x
        for name, x in call.items()
    }
    getattr(tritonattn, function)(**on_device)
