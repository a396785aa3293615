"""Which Problem a good call gives.  No kernel runs here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import (
    ALL,
    CACHED,
    PAGED,
    PREFIX,
    VARLEN,
    axis,
    bf16,
    f32,
    f64,
    fp16,
    good,
    i32,
    i64,
    new,
    rows,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from tritonattn.call import Call
from tritonattn.problem import MaskSpec, Problem
from tritonattn.validate import validate

EXPECTED = {
    VARLEN: {"batch": 2, "total_q": 3, "max_q": 3, "max_k": 7, "capacity_k": 7},
    PREFIX: {
        "batch": 2,
        "total_q": 3,
        "max_q": 3,
        "max_k": 27,
        "capacity_k": 27,
        "cache_dtype": fp16,
        "page_size": 8,
    },
    PAGED: {
        "batch": 2,
        "total_q": 2,
        "max_q": 1,
        "max_k": 24,
        "capacity_k": 24,
        "cache_dtype": fp16,
        "page_size": 8,
        "is_decode": True,
    },
}


def expected(function: str, **changes: Any) -> Problem:
    table = None if function == VARLEN else torch.int32
    fields: dict[str, Any] = dict(
        types=(table, None, None, None, None, None),
        function=function, dtype=fp16, out_dtype=fp16, head_dim=16, head_dim_v=24, num_kv_heads=2,
        group=2, mask=MaskSpec(has_right=True), **EXPECTED[function],
    )  # fmt: skip
    return Problem(**(fields | changes))


@pytest.mark.parametrize("function", ALL)
def test_validate_gives_the_problem(function: str, device: torch.device) -> None:
    assert validate(good(function, device)) == expected(function)


@pytest.mark.parametrize("function", ALL)
def test_validate_gives_the_problem_of_every_option(function: str, device: torch.device) -> None:
    total_q = EXPECTED[function]["total_q"]
    call = good(
        function, device, softmax_scale=-1, causal=True, window_size=[3, None], chunk_size=4,
        softcap=30, alibi_slopes=new(2, 4, dtype=f64), sinks=new(4, dtype=bf16),
        query_scale=new(total_q, dtype=f32), tree_mask=new(total_q, 2, dtype=torch.bool),
        k_scale=new(2, 2, dtype=f32), v_scale=0.5, return_lse=True, num_splits=256,
        out=new(total_q, 4, 24, dtype=f32), batch_invariant=True,
    )  # fmt: skip
    table = None if function == VARLEN else torch.int32
    assert validate(call) == expected(
        function, types=(table, None, f64, bf16, f32, None), out_dtype=f32,
        mask=MaskSpec(True, True, False, True, True), has_softcap=True,
        has_alibi=True, has_sinks=True, has_query_scale=True, batch_invariant=True, num_splits=256,
        has_scales=True, is_positive=False,
    )  # fmt: skip


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize(
    ("causal", "window", "left", "right"),
    [
        (True, None, False, True),
        (True, (-1, -1), False, True),
        (True, (0, 5), True, True),
        (False, None, False, False),
        (False, (-1, None), False, False),
        (False, (None, 0), False, True),
        (False, (7, -1), True, False),
    ],
)
def test_validate_says_which_sides_are_limited(
    function: str, causal: bool, window: Any, left: bool, right: bool, device: torch.device
) -> None:
    mask = validate(good(function, device, causal=causal, window_size=window)).mask
    assert mask == MaskSpec(causal=causal, has_left=left, has_right=right)


@pytest.mark.parametrize(
    ("function", "changes", "max_q", "max_k"),
    [
        (VARLEN, {"max_seqlen_q": 2, "max_seqlen_k": 3}, 2, 4),  # rounded up to a power of two
        (VARLEN, {"max_seqlen_q": 0, "max_seqlen_k": 0}, 1, 1),
        (VARLEN, {"max_seqlen_q": 2**40, "max_seqlen_k": 2**40}, 3, 7),
        (PREFIX, {"max_seqlen_q": 1}, 1, 25),
        (PREFIX, {"max_seqlen_k": 9}, 3, 16),
        (PAGED, {"max_seqlen_q": 2, "max_seqlen_k": 20}, 1, 24),
        (PAGED, {"cu_seqlens_q": new(3, dtype=i32)}, 2, 24),
        (PAGED, {"block_table": new(6, dtype=i64), "block_indptr": new(3, dtype=i32)}, 1, 48),
        (PAGED, {"block_table": axis(1, 0)}, 1, 1),
    ],
)
def test_validate_bounds_the_longest_sequence(
    function: str, changes: dict[str, Any], max_q: int, max_k: int, device: torch.device
) -> None:
    problem = validate(good(function, device, **changes))
    assert (problem.max_q, problem.max_k) == (max_q, max_k)


def test_validate_keeps_one_problem_while_a_decode_loop_grows(device: torch.device) -> None:
    call = good(PAGED, device, block_table=axis(1, 100))
    problems = set()
    for length in range(1, 513):
        call.max_seqlen_k = length
        problems.add(validate(call))
    assert len(problems) == 10


EMPTY = [
    (VARLEN, {"q": rows(0), "cu_seqlens_q": rows(1), "cu_seqlens_k": rows(1)}),
    (VARLEN, {"k": rows(0), "v": rows(0)}),
    (VARLEN, {"q": rows(0)}),
    (
        PREFIX,
        {
            "q": rows(0),
            "k": rows(0),
            "v": rows(0),
            "cu_seqlens_q": rows(1),
            "context_lens": rows(0),
            "block_table": rows(0),
        },
    ),
    (PREFIX, {"k_cache": rows(0), "v_cache": rows(0), "block_table": axis(1, 0)}),
    (PAGED, {"q": rows(0), "seq_lens": rows(0), "block_table": rows(0)}),
    (PAGED, {"k_cache": rows(0), "v_cache": rows(0)}),
    (PAGED, {"q": rows(0), "cu_seqlens_q": new(3, dtype=i32)}),
    (VARLEN, {"q": rows(0), "tree_mask": new(0, 1, dtype=torch.bool)}),
]


@pytest.mark.parametrize(("function", "changes"), EMPTY)
def test_validate_accepts_empty_tensors(
    function: str, changes: dict[str, Any], device: torch.device
) -> None:
    problem = validate(good(function, device, **changes))
    assert problem.max_q >= 1
    assert problem.max_k >= 1


def scattered(_: Call, old: torch.Tensor) -> torch.Tensor:
    """A slice of a head-major pool that keys and values share."""
    pages, size, heads, dim = old.shape
    return old.new_zeros(pages, heads, 2, size, dim + 8)[:, :, 1, :, :dim].transpose(1, 2)


STRIDES = [
    (CACHED, {"k_cache": scattered, "v_cache": scattered}),
    (CACHED, {"k_cache": lambda _, x: x[:, :1].expand(6, 8, 2, 16)}),
    (CACHED, {"block_table": lambda _, x: x.new_zeros(2, 99)[:, 3:6]}),
    (CACHED, {"block_table": lambda _, x: x[:, ::3]}),  # one column: no step is taken along it
    (ALL, {"q": lambda _, x: x.new_zeros(x.shape[0], 8, 16)[:, :4]}),
    (ALL, {"out": lambda c, _: c.q.new_zeros(c.q.shape[0], 6, 32)[:, :4, :24]}),
    (ALL, {"alibi_slopes": lambda c, _: c.q.new_ones(1).expand(2, 4)}),
    (ALL, {"sinks": lambda c, _: c.q.new_ones(8)[::2]}),
    (ALL, {"tree_mask": lambda c, _: c.q.new_ones(5, c.q.shape[0]).bool().T}),
    (ALL, {"k_scale": lambda c, _: torch.ones(2, 2, device=c.q.device).T}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "changes"), [(f, changes) for functions, changes in STRIDES for f in functions]
)
def test_validate_accepts_strides(
    function: str, changes: dict[str, Any], device: torch.device
) -> None:
    validate(good(function, device, **changes))


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (10, 2), (28, 4), (71, 1)])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(1, 1), (59, 96), (192, 128), (576, 512)])
def test_validate_accepts_heads(
    function: str, heads: int, kv_heads: int, head_dim: int, head_dim_v: int, device: torch.device
) -> None:
    call = good(function, device)
    call.q = call.q.new_zeros(call.q.shape[0], heads, head_dim)
    for name, dim in (("k", head_dim), ("v", head_dim_v)):
        for kind in (name, f"{name}_cache"):
            old = getattr(call, kind)
            if old is not None:
                setattr(call, kind, old.new_zeros(*old.shape[:-2], kv_heads, dim))
    problem = validate(call)
    assert (problem.num_kv_heads, problem.group) == (kv_heads, heads // kv_heads)
    assert (problem.head_dim, problem.head_dim_v) == (head_dim, head_dim_v)


@pytest.mark.parametrize("function", CACHED)
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"])
@pytest.mark.parametrize("page_size", [1, 12, 544])
def test_validate_accepts_float8_caches(
    function: str, name: str, page_size: int, device: torch.device
) -> None:
    values = {"v": axis(2, 16)} if function == PREFIX else {}
    shape = new(6, page_size, 2, 16, dtype=getattr(torch, f"float8_{name}"))
    problem = validate(good(function, device, k_cache=shape, v_cache=shape, **values))
    assert problem.cache_format == name
    assert problem.page_size == page_size


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 2)])
def test_validate_accepts_scales(
    function: str, name: str, shape: tuple[int, ...], device: torch.device
) -> None:
    validate(good(function, device, **{name: new(*shape, dtype=f32)}))


class NoOperation(TorchDispatchMode):
    """Fails on any operation on a tensor: reading a value is one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"validate ran {func}")


@pytest.mark.parametrize("function", ALL)
def test_validate_runs_no_operation(function: str, device: torch.device) -> None:
    total_q = EXPECTED[function]["total_q"]
    call = good(
        function, device, alibi_slopes=new(4), sinks=new(4), query_scale=new(total_q, dtype=f32),
        tree_mask=new(total_q, 2, dtype=torch.bool), k_scale=new(2, dtype=f32),
        v_scale=new(dtype=f32), out=new(total_q, 4, 24),
    )  # fmt: skip
    with NoOperation():
        assert validate(call) == validate(call)


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("symbolic", [False, True])
def test_validate_accepts_tensors_without_values(
    function: str, symbolic: bool, device: torch.device
) -> None:
    shapes = ShapeEnv() if symbolic else None
    call = good(function, device)
    with FakeTensorMode(shape_env=shapes, static_shapes=not symbolic) as mode:
        for name in Call.__slots__:
            value = getattr(call, name)
            if isinstance(value, torch.Tensor):
                setattr(call, name, mode.from_tensor(value))
        assert validate(call) == expected(function)
