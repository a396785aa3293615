"""What a bad call gets.  No kernel runs here."""

# ruff: noqa: E501 -- one case a row

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from calls import (
    ALL,
    CACHED,
    META,
    NEW,
    PAGED,
    PREFIX,
    VARLEN,
    axis,
    bf16,
    f32,
    f64,
    fp8,
    good,
    i32,
    i64,
    listed,
    new,
    rows,
    strided,
    to,
)

import tritonattn.device
from tritonattn import attend as attending
from tritonattn.call import Call
from tritonattn.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from tritonattn.validate import validate

TYPE, VALUE = ArgumentTypeError, ArgumentValueError


REPEATED = object()


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is launched, and whatever passed once is repeated."""
    monkeypatch.setattr(
        attending, "_launcher", lambda: lambda call, problem: (problem, lambda *_, **__: REPEATED)
    )
    attending.forget()
    yield
    attending.forget()


def attend(call: Call) -> Any:
    """The public function: the call's problem, or ``REPEATED`` where that was not asked for."""
    names = [name for name in Call.__slots__ if name not in ("function", "is_operator", "lse")]
    return attending.attend(call.function, *(getattr(call, name) for name in names))


# Functions, changes to a good call, error, then what the message says: argument, rule, got, fix.
REFUSED = [
    # q
    (ALL, {"q": None}, TYPE, "q", "a tensor [total_q, Hq, D]", "None", "Pass q as a torch.Tensor."),
    (ALL, {"q": listed}, TYPE, "q", "must be a tensor", "list [[[", "Pass torch.tensor(q)"),
    (ALL, {"q": lambda _, q: q.to_sparse()}, TYPE, "q", "strided layout", "torch.sparse_coo", ".to_dense()"),
    (ALL, {"q": to(f64)}, TYPE, "q", "float16, bfloat16 or float32", "float64 [", "Pass q in the model's dtype"),
    (ALL, {"q": to(fp8)}, TYPE, "q", "float16, bfloat16 or float32", "float8_e4m3fn [", "Pass q in the model's"),
    (ALL, {"q": new(3, 64)}, VALUE, "q", "must have 3 axes, [total_q, Hq, D]", "float16 [3, 64]", "Pack the tokens"),
    (ALL, {"q": strided}, VALUE, "q", "stride 1 on its last axis", "strides [128, 32, 2]", "Pass q.contiguous()."),
    (ALL, {"q": axis(1, 3)}, VALUE, "q", "Hq % Hkv == 0", "3 query heads and 2 KV heads", "whole number of query"),
    (ALL, {"q": axis(1, 0)}, VALUE, "q", "Hq % Hkv == 0", "0 query heads and 2 KV heads", "whole number of query"),
    ((PAGED,), {"q": rows(5)}, VALUE, "q", "must have 2 on axis 0 (batch of seq_lens", "[5, 4, 16]", "cu_seqlens_q for"),
    # k, v
    (NEW, {"k": None}, TYPE, "k", "a tensor [total_k, Hkv, D]", "None", "Pass k as a torch.Tensor."),
    (NEW, {"v": None}, TYPE, "v", "a tensor [total_k, Hkv, Dv]", "None", "Pass v as a torch.Tensor."),
    (NEW, {"k": new(3, 2, 2, 16)}, VALUE, "k", "must have 3 axes", "[3, 2, 2, 16]", "Reshape k to [total_k, Hkv, D]."),
    (NEW, {"v": strided}, VALUE, "v", "stride 1 on its last axis", "strides [96, 48, 2]", "Pass v.contiguous()."),
    (NEW, {"k": META}, VALUE, "k", "must be on the device of q", "on meta", "Pass k.to(q.device)."),
    (NEW, {"k": to(bf16)}, TYPE, "k", "the dtype of q, float16", "bfloat16 [", "Pass k.to(q.dtype)."),
    (NEW, {"v": to(f32)}, TYPE, "v", "the dtype of q, float16", "float32 [", "Pass v.to(q.dtype)."),
    (NEW, {"v": rows(9)}, VALUE, "v", "on axis 0 (total_k of k)", "[9, 2, 24]", "one value row for each key row"),
    (NEW, {"v": axis(1, 1)}, VALUE, "v", "must have 2 on axis 1 (Hkv of k)", ", 1, 24]", "the same KV heads"),
    (NEW, {"k": axis(1, 0), "v": axis(1, 0)}, VALUE, "k", "Hkv >= 1 on axis 1", ", 0, 16]", "at least one KV head"),
    (NEW, {"k": axis(2, 577)}, VALUE, "k", "D from 1 to 576", ", 577]", "Larger heads have no kernel"),
    (NEW, {"k": axis(2, 0)}, VALUE, "k", "D from 1 to 576", ", 0]", "at least one dim"),
    (NEW, {"v": axis(2, 513)}, VALUE, "v", "Dv from 1 to 512", ", 513]", "Larger heads have no kernel"),
    (NEW, {"k": axis(2, 32)}, VALUE, "k", "must have 16 on axis 2 (D of q)", ", 32]", "the same head size"),
    ((PREFIX,), {"k": rows(4), "v": rows(4)}, VALUE, "k", "must have 3 on axis 0 (total_q of q)", "[4, 2, 16]", "padding rows"),
    ((PREFIX,), {"k": axis(1, 1), "v": axis(1, 1)},
     VALUE, "k", "must have 2 on axis 1 (Hkv of k_cache)", "[3, 1, 16]", "heads"),
    ((PREFIX,), {"v": axis(2, 16)}, VALUE, "v", "must have 24 on axis 2 (Dv of v_cache)", "[3, 2, 16]", "of the cache"),
    # the cache
    (CACHED, {"k_cache": None}, TYPE, "k_cache", "a tensor [num_pages, page_size, Hkv, D]", "None", "Pass k_cache as"),
    (CACHED, {"v_cache": listed}, TYPE, "v_cache", "a tensor [num_pages, page_size, Hkv, Dv]", "list", "torch.tensor(v_cache)"),
    (CACHED, {"k_cache": new(48, 2, 16)}, VALUE, "k_cache", "must have 4 axes", "[48, 2, 16]", "Permute k_cache to"),
    (CACHED, {"v_cache": strided}, VALUE, "v_cache", "stride 1 on its last axis", "strides", "whose last axis is contiguous"),
    (CACHED, {"v_cache": META}, VALUE, "v_cache", "must be on the device of q", "on meta", "Pass v_cache.to(q.device)."),
    (CACHED, {"k_cache": to(f32), "v_cache": to(f32)},
     TYPE, "k_cache", "must be float16, float8_e4m3fn", "float32", "of q's dtype"),
    (CACHED, {"k_cache": to(torch.int8), "v_cache": to(torch.int8)},
     TYPE, "k_cache", "must be float16, float8", "int8", "float8"),
    (CACHED, {"k_cache": to(fp8)}, TYPE, "v_cache", "the dtype of k_cache", "float16", "Pass v_cache.to(k_cache.dtype)."),
    (CACHED, {"v_cache": rows(5)}, VALUE, "v_cache", "must have 6 on axis 0 (num_pages of k_cache)", "[5, 8", "same pages"),
    (CACHED, {"v_cache": axis(1, 4)}, VALUE, "v_cache", "must have 8 on axis 1 (page_size of", "[6, 4", "same pages"),
    (CACHED, {"v_cache": axis(2, 4)}, VALUE, "v_cache", "must have 2 on axis 2 (Hkv of k_cache)", "8, 4, 24]", "heads"),
    (CACHED, {"k_cache": axis(1, 0), "v_cache": axis(1, 0)}, VALUE, "k_cache", "page_size >= 1", "[6, 0", "at least one token"),
    (CACHED, {"k_cache": axis(2, 0), "v_cache": axis(2, 0)},
     VALUE, "k_cache", "Hkv >= 1 on axis 2", "8, 0, 16]", "one KV head"),
    (CACHED, {"k_cache": axis(3, 577)}, VALUE, "k_cache", "D from 1 to 576", ", 577]", "Larger heads have no kernel"),
    (CACHED, {"v_cache": axis(3, 513)}, VALUE, "v_cache", "Dv from 1 to 512", ", 513]", "Larger heads have no kernel"),
    (CACHED, {"k_cache": axis(3, 8)}, VALUE, "k_cache", "must have 16 on axis 3 (D of q)", ", 8]", "the same head size"),
    # the table
    (CACHED, {"block_table": to(f32)},
     TYPE, "block_table", "int32 or int64 [batch, max_pages]", "float32 [2, 3]", "Pass block_table.int()."),
    (CACHED, {"block_table": listed},
     TYPE, "block_table", "a tensor int32 [batch, max_pages]", "list [[0,", "torch.tensor(block_table)"),
    (CACHED, {"block_table": new(6, dtype=i32)}, VALUE, "block_table", "must have 2 axes", "int32 [6]", "block_indptr as well"),
    (CACHED, {"block_table": rows(3)}, VALUE, "block_table", "must have 2 on axis 0 (batch", "[3, 3]", "block_table[:2]"),
    (CACHED, {"block_table": strided}, VALUE, "block_table", "stride 1 on its last axis", "strides [6, 2]", "contiguous()"),
    (CACHED, {"block_table": META}, VALUE, "block_table", "on the device of q", "on meta", "Pass block_table.to(q.device)."),
    (CACHED, {"block_indptr": new(3, dtype=i32)},
     VALUE, "block_table", "must have 1 axis, [total_pages]", "int32 [2, 3]", "Leave block_indptr out"),
    (CACHED, {"block_table": new(6, dtype=i32), "block_indptr": new(3, dtype=i64)},
     TYPE, "block_indptr", "must be int32", "int64", "block_indptr.int()"),
    (CACHED, {"block_table": new(6, dtype=i32), "block_indptr": new(2, dtype=i32)},
     VALUE, "block_indptr", "must have 3 entries", "[2]", "pages start"),
    # lengths
    (NEW, {"cu_seqlens_q": None}, TYPE, "cu_seqlens_q", "a tensor int32 [batch + 1]", "None", "Pass cu_seqlens_q as"),
    (NEW, {"cu_seqlens_q": listed},
     TYPE, "cu_seqlens_q", "a tensor int32 [batch + 1]", "list [0, 2, 3]", "torch.tensor(cu_seqlens_q)"),
    (NEW, {"cu_seqlens_q": to(i64)},
     TYPE, "cu_seqlens_q", "must be int32 [batch + 1]", "int64 [3]", "Pass cu_seqlens_q.int()."),
    (NEW, {"cu_seqlens_q": new(3, 1, dtype=i32)},
     VALUE, "cu_seqlens_q", "must have 1 axis", "int32 [3, 1]", "Reshape cu_seqlens_q"),
    (NEW, {"cu_seqlens_q": new(0, dtype=i32)},
     VALUE, "cu_seqlens_q", "must have batch + 1 entries", "int32 [0]", "prefix sums"),
    (NEW, {"cu_seqlens_q": strided},
     VALUE, "cu_seqlens_q", "stride 1 on its last axis", "strides [2]", "cu_seqlens_q.contiguous()"),
    (NEW, {"cu_seqlens_q": META}, VALUE, "cu_seqlens_q", "on the device of q", "on meta", "cu_seqlens_q.to(q.device)"),
    ((PAGED,), {"cu_seqlens_q": new(4, dtype=i32)},
     VALUE, "cu_seqlens_q", "must have 3 entries (batch + 1, batch 2 of seq_lens)", "[4]", "prefix sums"),
    ((PAGED,), {"cu_seqlens_q": new(3, dtype=i64)},
     TYPE, "cu_seqlens_q", "must be int32", "int64 [3]", "Pass cu_seqlens_q.int()."),
    ((VARLEN,), {"cu_seqlens_k": rows(4)},
     VALUE, "cu_seqlens_k", "must have 3 entries (batch + 1, batch 2 of cu_seqlens_q)", "[4]", "prefix sums"),
    ((VARLEN,), {"cu_seqlens_k": to(i64)}, TYPE, "cu_seqlens_k", "must be int32", "int64 [3]", "Pass cu_seqlens_k.int()."),
    ((PREFIX,), {"context_lens": rows(3)},
     VALUE, "context_lens", "must have 2 entries (batch of cu_seqlens_q)", "[3]", "one cached length"),
    ((PREFIX,), {"context_lens": to(i64)},
     TYPE, "context_lens", "must be int32 [batch]", "int64 [2]", "Pass context_lens.int()."),
    ((PAGED,), {"seq_lens": to(i64)}, TYPE, "seq_lens", "must be int32 [batch]", "int64 [2]", "Pass seq_lens.int()."),
    ((PAGED,), {"seq_lens": META}, VALUE, "seq_lens", "on the device of q", "on meta", "Pass seq_lens.to(q.device)."),
    # options: numbers
    (ALL, {"softmax_scale": math.nan}, VALUE, "softmax_scale", "must be a finite float", "nan", "finite in float32"),
    (ALL, {"softmax_scale": 1e39}, VALUE, "softmax_scale", "must be a finite float", "1e+39", "finite in float32"),
    (ALL, {"softmax_scale": True}, TYPE, "softmax_scale", "must be a finite float", "bool True", "float(softmax_scale)"),
    (ALL, {"softmax_scale": new(1)},
     TYPE, "softmax_scale", "must be a finite float", "a tensor, float16 [1]", "float(softmax_scale)"),
    (ALL, {"softcap": -1.0}, VALUE, "softcap", "a finite float of at least 0", "-1.0", "softcap=0.0 for no cap"),
    (ALL, {"softcap": math.inf}, VALUE, "softcap", "a finite float of at least 0", "inf", "softcap=0.0 for no cap"),
    (ALL, {"softcap": None}, TYPE, "softcap", "a finite float of at least 0", "None", "softcap=0.0 for no cap"),
    (ALL, {"causal": 1}, TYPE, "causal", "must be True or False", "int 1", "Pass bool(causal)."),
    (ALL, {"return_lse": None}, TYPE, "return_lse", "must be True or False", "None", "Pass bool(return_lse)."),
    (ALL, {"batch_invariant": 0}, TYPE, "batch_invariant", "must be True or False", "int 0", "bool(batch_invariant)"),
    (ALL, {"window_size": 4096}, TYPE, "window_size", "None or (left, right)", "4096", "(W - 1, 0)"),
    (ALL, {"window_size": (1, 2, 3)}, TYPE, "window_size", "None or (left, right)", "(1, 2, 3)", "(W - 1, 0)"),
    (ALL, {"window_size": (True, 0)}, TYPE, "window_size", "an int of at least -1", "(True, 0)", "Python ints or None"),
    (ALL, {"window_size": (1.0, 0)}, TYPE, "window_size", "an int of at least -1", "(1.0, 0)", "Python ints or None"),
    (ALL, {"window_size": (3, -2)}, VALUE, "window_size", "an int of at least -1", "(3, -2)", "Pass -1 for a side"),
    (ALL, {"chunk_size": 0}, VALUE, "chunk_size", "an int of at least 1", "0", "chunk_size=None"),
    (ALL, {"chunk_size": 2.0}, TYPE, "chunk_size", "an int of at least 1", "float 2.0", "Pass a Python int"),
    (ALL, {"chunk_size": True}, TYPE, "chunk_size", "an int of at least 1", "bool True", "Pass a Python int"),
    (ALL, {"num_splits": 257}, VALUE, "num_splits", "an int from 0 to 256", "257", "num_splits=0"),
    (ALL, {"num_splits": -1}, VALUE, "num_splits", "an int from 0 to 256", "-1", "num_splits=0"),
    (ALL, {"num_splits": True}, TYPE, "num_splits", "an int from 0 to 256", "bool True", "Pass a Python int"),
    (ALL, {"max_seqlen_q": -1}, VALUE, "max_seqlen_q", "an int of at least 0", "-1", "max_seqlen_q of at least 0"),
    (ALL, {"max_seqlen_k": new(dtype=i32)},
     TYPE, "max_seqlen_k", "an int of at least 0", "a tensor, int32 []", "Pass a Python int"),
    # options: tensors
    (ALL, {"alibi_slopes": new(3, dtype=f32)},
     VALUE, "alibi_slopes", "[Hq = 4] or [batch = 2, Hq = 4]", "[3]", "in that shape"),
    (ALL, {"alibi_slopes": new(4, 2, dtype=f32)}, VALUE, "alibi_slopes", "[Hq = 4] or [batch", "[4, 2]", "in that shape"),
    (ALL, {"alibi_slopes": new(4, dtype=i32)}, TYPE, "alibi_slopes", "float32 or float64", "int32 [4]", "alibi_slopes.float()"),
    (ALL, {"alibi_slopes": 0.5}, TYPE, "alibi_slopes", "must be a tensor [Hq = 4]", "float 0.5", "as a torch.Tensor"),
    (ALL, {"sinks": new(2, 4)}, VALUE, "sinks", "must be [Hq = 4]", "float16 [2, 4]", "Pass sinks in that shape."),
    (ALL, {"sinks": new(4, dtype=i64)}, TYPE, "sinks", "float32 or float64", "int64 [4]", "Pass sinks.float()."),
    (ALL, {"query_scale": new(99, dtype=f32)}, VALUE, "query_scale", "must be [total_q = ", "float32 [99]", "in that shape"),
    (ALL, {"query_scale": new(3)}, TYPE, "query_scale", "must be float32", "float16 [3]", "Pass query_scale.float()."),
    (ALL, {"tree_mask": new(3, 2)}, TYPE, "tree_mask", "must be bool", "float16 [3, 2]", "Pass tree_mask.bool()."),
    (ALL, {"tree_mask": new(3, dtype=torch.bool)}, VALUE, "tree_mask", "must have 2 axes", "bool [3]", "Reshape tree_mask"),
    (ALL, {"tree_mask": new(9, 2, dtype=torch.bool)},
     VALUE, "tree_mask", "on axis 0 (total_q of q)", "bool [9, 2]", "one row for"),
    (NEW, {"tree_mask": new(3, 0, dtype=torch.bool)},
     VALUE, "tree_mask", "at least one column", "bool [3, 0]", "one column for"),
    (NEW, {"tree_mask": new(3, 2, dtype=torch.bool), "causal": False},
     VALUE, "tree_mask", "causal must be True", "causal=False", "Pass causal=True"),
    (ALL, {"k_scale": True}, TYPE, "k_scale", "a finite float or a float32 tensor", "bool True", "float(k_scale)"),
    (ALL, {"v_scale": math.inf}, VALUE, "v_scale", "a finite float or a float32 tensor", "inf", "finite in float32"),
    (ALL, {"k_scale": new(2)},
     TYPE, "k_scale", "a float or float32 [], [1], [Hkv = 2] or [B = 2, Hkv = 2]", "float16 [2]", "k_scale.float()"),
    (ALL, {"v_scale": new(4, dtype=f32)}, VALUE, "v_scale", "[Hkv = 2] or [B = 2, Hkv = 2]", "float32 [4]", "Reshape v_scale"),
    (ALL, {"out": new(3, 4, 24, dtype=f64)}, TYPE, "out", "float16, bfloat16 or float32", "float64", "computed in"),
    (ALL, {"out": new(9, 4, 24)}, VALUE, "out", "must be [total_q, Hq, Dv] = [", "[9, 4, 24]", "torch.empty of that shape"),
    (NEW, {"out": lambda c, _: strided(c, c.q.new_zeros(3, 4, 24))},
     VALUE, "out", "stride 1", "strides", "last axis is contiguous"),
    (NEW, {"out": lambda c, _: c.q.new_zeros(1, 4, 24).expand(3, 4, 24)},
     VALUE, "out", "its own memory", "strides [0, 24, 1]", "torch.empty"),
]  # fmt: skip


def pairs() -> Iterator[Any]:
    for functions, changes, error, argument, rule, got, fix in REFUSED:
        for function in functions:
            label = "-".join(f"{name}" for name in changes)
            yield pytest.param(
                function, changes, error, argument, rule, got, fix, id=f"{function}-{label}"
            )


@pytest.mark.parametrize(
    ("function", "changes", "error", "argument", "rule", "got", "fix"), list(pairs())
)
def test_validate_refuses_bad_calls(
    function: str,
    changes: dict[str, Any],
    error: type[Exception],
    argument: str,
    rule: str,
    got: str,
    fix: str,
    device: torch.device,
) -> None:
    attend(good(function, device))
    assert attend(good(function, device)) is REPEATED  # which must not let another pass
    with pytest.raises(error) as caught:
        attend(good(function, device, **changes))
    message = str(caught.value)
    asked, _, rest = message.partition("; got ")
    assert asked.startswith(f"{function}: {argument} ")
    assert rule in asked
    came, _, way_out = rest.partition(". ")
    assert got in came
    assert fix in way_out
    assert message.endswith((".", ")"))


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize(
    ("name", "fine", "wrong"),
    [
        ("causal", True, 1),
        ("softmax_scale", 1.0, math.nan),
        ("softcap", 1.0, True),
        ("window_size", (1, 0), (True, False)),
        ("chunk_size", 1, True),
        ("num_splits", 1, True),
        ("batch_invariant", False, 0),
        ("return_lse", False, 0),
        ("max_seqlen_q", 1, True),
        ("max_seqlen_k", 1, 1.0),
        ("max_seqlen_q", 1, -1),
        ("max_seqlen_k", 0, False),
        ("window_size", (1, 0), (1.0, 0)),
        ("window_size", (1, 0), range(1, -1, -1)),
        ("window_size", None, ()),
        ("window_size", (1, 0), torch.tensor([1, 0])),
        ("k_scale", 1.0, math.nan),
        ("v_scale", 1.0, True),
    ],
)
def test_validate_refuses_a_scalar_that_equals_one_that_passed(
    function: str, name: str, fine: Any, wrong: Any, device: torch.device
) -> None:
    for _ in range(2):
        known = attend(good(function, device, **{name: fine}))
    assert known is REPEATED
    with pytest.raises((TYPE, VALUE), match=f"^{function}: {name} "):
        attend(good(function, device, **{name: wrong}))


GRADS = [
    *((f, name) for f in ALL for name in ("q", "alibi_slopes", "sinks", "query_scale", "k_scale", "v_scale", "out")),
    *((f, name) for f in NEW for name in ("k", "v")),
    *((f, name) for f in CACHED for name in ("k_cache", "v_cache")),
]  # fmt: skip


@pytest.mark.parametrize(("function", "name"), GRADS)
def test_validate_refuses_grad_only_while_grad_mode_is_on(
    function: str, name: str, device: torch.device
) -> None:
    call = good(function, device)
    total_q = call.q.shape[0]
    optional = {
        "alibi_slopes": new(4, dtype=f32), "sinks": new(4), "query_scale": new(total_q, dtype=f32),
        "k_scale": new(dtype=f32), "v_scale": new(2, dtype=f32), "out": new(total_q, 4, 24),
    }  # fmt: skip
    if name in optional:
        setattr(call, name, optional[name](call, None))
    problem = attend(call)
    getattr(call, name).requires_grad_()
    for is_known in (True, False):
        if not is_known:
            attending.forget()
        with torch.no_grad():
            assert attend(call) in (problem, REPEATED)
        with torch.inference_mode():
            assert attend(call) is REPEATED
        with pytest.raises(VALUE) as caught:
            attend(call)
    message = str(caught.value)
    assert message.startswith(f"{function}: {name} must not require grad while grad mode is on")
    assert "requires_grad=True" in message
    assert message.endswith(f"torch.no_grad() or torch.inference_mode(), or pass {name}.detach().")


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("name", ["q", "out"])
def test_validate_refuses_bfloat16_where_the_gpu_has_none(
    function: str, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    turing = tritonattn.device.target(75, name="Tesla T4")
    monkeypatch.setattr(tritonattn.device, "describe", lambda _: turing)
    call = good(function, device)
    attend(call)
    if name == "out":
        call.out = call.q.new_empty(call.q.shape[0], 4, 24, dtype=bf16)
    else:
        for tensor in ("q", "k", "v", "k_cache", "v_cache"):
            value = getattr(call, tensor)
            setattr(call, tensor, None if value is None else value.to(bf16))
    with pytest.raises(UnsupportedError) as caught:
        attend(call)
    assert str(caught.value) == (
        f"{function}: {name} may be bfloat16 only on a GPU of sm_80 or later; got bfloat16 on "
        f"Tesla T4 (sm_75). Pass {name}.half(): float16 and float32 work here."
    )


@pytest.mark.parametrize("function", ALL)
def test_validate_refuses_cpu_tensors_where_there_is_a_gpu(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tritonattn.device, "interpreting", lambda: False)
    monkeypatch.setattr(tritonattn.device, "describe", tritonattn.device.describe.__wrapped__)
    with pytest.raises(UnsupportedError, match=r"on the CPU.*\.cuda\(\).*TRITON_INTERPRET=1"):
        validate(good(function))


@pytest.mark.parametrize("function", ALL)
def test_attend_remembers_a_bounded_number_of_calls(
    function: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attending, "_MOST_KNOWN", 4)
    call = good(function, device)
    for splits in range(20):
        call.num_splits = splits
        assert attend(call) is not REPEATED
        assert attend(call) is REPEATED
        assert len(attending._known) <= 4


def test_attend_repeats_a_decode_loop_that_grows(device: torch.device) -> None:
    call = good(PAGED, device, block_table=axis(1, 100))
    problems = []
    for length in range(1, 513):
        call.max_seqlen_k = length
        problems.append(attend(call))
    assert sum(problem is not REPEATED for problem in problems) == 10


def test_attend_repeats_calls_that_take_turns(device: torch.device) -> None:
    calls = [good(PAGED, device, block_table=axis(1, columns)) for columns in (3, 4, 5)]
    assert all(attend(call) is not REPEATED for call in calls)
    assert all(attend(call) is REPEATED for _ in range(3) for call in calls)


@pytest.mark.parametrize("has_guards", [True, False])
def test_attend_looks_at_both_of_two_arguments_that_were_one_tensor(
    has_guards: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_guards:
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    call = good(VARLEN, device)
    one = call.cu_seqlens_k = call.cu_seqlens_q
    attend(call)
    assert attend(call) is REPEATED
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        setattr(call, name, one.clone())
        assert attend(call) is REPEATED  # as it is like the one that passed
        for wrong in (one[:-1], one.long(), torch.empty(2 * len(one), dtype=i32)[::2]):
            setattr(call, name, wrong)
            with pytest.raises((TYPE, VALUE), match=f"^{VARLEN}: cu_seqlens_"):
                attend(call)
        setattr(call, name, one)
        assert attend(call) is REPEATED
