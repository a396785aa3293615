"""torch.compile: the same bits as eager, in one graph, compiled once for all lengths."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from traced import (
    CALLS,
    CASES,
    IDS,
    PAGED,
    assert_same_bits,
    decode_inputs,
    decode_step,
    public,
    small,
    tensors,
)  # fmt: skip

from tritonattn import (
    alibi_slopes,
    attention_temperature,
    copy_blocks,
    gather_kv_cache,
    merge_states,
    paged_attention,
    prefix_attention,
    swap_blocks,
    varlen_attention,
    write_kv_cache,
)
from tritonattn import (
    attend as way,
)
from tritonattn.testing import Case, generator, normal


@pytest.fixture(autouse=True)
def _forget_compiled_programs() -> None:
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], **how: Any) -> tuple[Any, CompileCounterWithBackend]:
    """The function, with no graph break allowed, and what counts its compilations."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, **how), counter


@pytest.mark.parametrize(("name", "build"), CALLS, ids=IDS)
def test_compiled_function_gives_eager_bits(name, build, device) -> None:
    args, options = build(device)
    expected_args, expected_options = build(device)
    function = public(name)
    run, counter = compiled(lambda args, options: function(*args, **options))
    result = run(args, options)
    assert_same_bits(result, function(*expected_args, **expected_options))
    assert_same_bits((args, options), (expected_args, expected_options))  # what it writes, too
    assert counter.frame_count == 1
    [graph] = counter.graphs
    called = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    assert called - {operator.getitem} == {getattr(torch.ops.tritonattn, name).default}
    if options.get("out") is not None:
        assert tensors(result)[0] is options["out"]


def test_compiled_cases_have_every_option_of_attention() -> None:
    """So that an option which the operators lose is found by the test above."""
    for name in {case.function for case in CASES}:
        parameters = inspect.signature(public(name)).parameters.values()
        options = {p.name for p in parameters if p.kind == p.KEYWORD_ONLY}
        used = {option for case in CASES for option in case.build()[1]}
        assert options <= used, name


@pytest.mark.parametrize("views", ["made inside", "made outside", "own memory"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_write_then_attend_keeps_its_order(views, dtype, device) -> None:
    def inside(q, k, v, pool, *rest):
        return decode_step(q, k, v, pool.unbind(1), *rest)

    def run(step, inputs):
        q, k, v, pool, *rest = inputs
        if views == "made inside":
            return pool, step(q, k, v, pool, *rest)
        caches = pool.unbind(1) if views == "made outside" else [x.clone() for x in pool.unbind(1)]
        return caches, step(q, k, v, caches, *rest)

    step = inside if views == "made inside" else decode_step
    inputs = decode_inputs(2, 5, 3, device)
    inputs[3] = inputs[3].to(dtype)
    program, _ = compiled(step)
    expected = run(step, [x.clone() for x in inputs])
    assert_same_bits(run(program, inputs), expected)


def test_written_caches_and_results_are_not_copied_by_inductor(device) -> None:
    """The graph's copies for mutation, which would move the whole cache, are all taken out.

    All of the program are operators of this package, so that nothing wants a C++ compiler.
    """
    from torch._inductor.utils import run_and_get_code

    q, k, v, pool, *rest = decode_inputs(2, 5, 3, device)
    expected_pool = pool.clone()
    expected = decode_step(q, k, v, expected_pool.unbind(1), *rest)
    step = torch.compile(decode_step, fullgraph=True)
    result, code = run_and_get_code(step, q, k, v, pool.unbind(1), *rest)
    assert_same_bits((result, pool), (expected, expected_pool))
    calls = [line for line in code[-1].splitlines() if "torch.ops.tritonattn." in line]
    assert len(calls) == 4
    allocated = [line for line in code[-1].splitlines() if " = empty_strided" in line]
    assert len(allocated) == 2, allocated  # what attention returns, and no copy


# One program for all sizes


def mark(*inputs: Any) -> None:
    """Say that all first axes, and the width of a block table, may have any size."""
    for x in tensors(inputs):
        torch._dynamo.mark_dynamic(x, 0)
        if x.dim() == 2 and x.dtype == torch.int32:
            torch._dynamo.mark_dynamic(x, 1)


# Sizes meet those of other axes (2 KV heads, 4 heads, pages of 4), which must not tie them.
DECODES = ((4, 6, 3), (2, 4, 2), (3, 9, 5))


def test_one_program_decodes_all_sizes(device) -> None:
    program, counter = compiled(decode_step)
    for sizes in DECODES:
        inputs, twins = decode_inputs(*sizes, device), decode_inputs(*sizes, device)
        caches, expected_caches = (
            [x.clone() for x in each[3].unbind(1)] for each in (inputs, twins)
        )
        inputs[3], twins[3] = caches, expected_caches
        mark(inputs)
        assert_same_bits(program(*inputs), decode_step(*twins))
        assert_same_bits(caches, expected_caches)
    assert counter.frame_count == 1


def test_unmarked_sizes_compile_a_second_program_and_no_third(device) -> None:
    """All sizes change at the second call, bounds and scales with them."""

    def step(inputs, bound):
        q, _, _, pool, _, table, lens = inputs
        return paged_attention(q, *pool.unbind(1), table, lens, max_seqlen_k=bound)

    program, counter = compiled(step)
    for bound, sizes in enumerate(DECODES, 20):
        inputs = decode_inputs(*sizes, device)
        assert_same_bits(program(inputs, bound), step(inputs, bound))
    assert counter.frame_count == 2


@pytest.mark.parametrize("function", [varlen_attention, prefix_attention, paged_attention])
def test_one_program_attends_to_all_lengths_with_every_option(function, device) -> None:
    def call(args, options):
        return function(*args, **options, causal=True, return_lse=True)

    program, counter = compiled(call)
    for k_lens, q_lens in (((5, 9), (5, 3)), ((2, 0, 9, 1), (2, 4, 1, 1))):
        case = Case(
            function.__name__, k_lens=k_lens, q_lens=q_lens, alibi=2, sinks=True,
            query_scale=True, tree_mask=True, kv_scale="[B, Hkv]", out="contiguous",
            options={"window_size": (3, None), "softcap": 5.0, "num_splits": 2}, **small,
        )  # fmt: skip
        args, options = case.build(device)
        for x in args:  # a cache's pages and the table's columns with all first axes
            mark(x)
        for name, x in options.items():
            if isinstance(x, Tensor) and name != "sinks":
                mark(x)
        torch._dynamo.mark_dynamic(options["tree_mask"], 1)
        assert_same_bits(program(args, options), call(*case.build(device)))
    assert counter.frame_count == 1


def test_one_program_moves_any_number_of_tokens_and_pages(device) -> None:
    def step(k, v, cache, slots, table, lens, starts, pairs, other):
        write_kv_cache(k, v, cache, cache, slots)
        copy_blocks([cache], pairs)
        swap_blocks(cache, other, pairs)
        total_k = k.shape[0] + 10
        k, v = gather_kv_cache(cache, cache, table, lens, cu_seqlens_k=starts, total_k=total_k)
        return merge_states([k, v], [k[..., 0].t(), v[..., 0].t()])

    def inputs(new: int, pages: int, batch: int, copies: int) -> list[Any]:
        how: dict[str, Any] = {"dtype": torch.float32, "generator": generator(new)}
        k, v = normal(new, 2, 16, **how), normal(new, 2, 16, **how)
        cache, other = normal(pages, 4, 2, 16, **how), normal(pages + 1, 4, 2, 16, **how)
        table = torch.arange(batch * 2, dtype=torch.int32).view(batch, 2) % pages
        lens = torch.full((batch,), 3, dtype=torch.int32)
        starts = torch.arange(batch + 1, dtype=torch.int32) * 3
        pairs = torch.stack([torch.arange(copies), pages - 1 - torch.arange(copies)], 1)
        arguments = [k, v, cache, torch.arange(new), table, lens, starts, pairs, other]
        arguments = [x.to(device) for x in arguments]
        mark(arguments)
        return arguments

    program, counter = compiled(step)
    for sizes in ((4, 4, 2, 2), (2, 6, 4, 3), (7, 5, 3, 2)):
        given, twins = inputs(*sizes), inputs(*sizes)
        assert_same_bits(program(*given), step(*twins))
        assert_same_bits(given, twins)
    assert counter.frame_count == 1


def test_alibi_slopes_and_attention_temperature_compile_as_they_are() -> None:
    def both(positions: Tensor) -> tuple[Tensor, Tensor]:
        return alibi_slopes(6), attention_temperature(positions, floor_scale=2.0)

    program, counter = compiled(both)
    for count in (5, 9, 3):
        positions = torch.arange(count)
        assert_same_bits(program(positions), both(positions))
    assert counter.frame_count == 2


def test_compiled_program_runs_the_whole_eager_way_each_time(device) -> None:
    """Lengths are device values, of which the program holds none; it validates as eager does."""
    (q, *cache, lens), options = Case(PAGED, k_lens=(5, 9), **small).build(device)
    program, counter = compiled(paged_attention)
    for lengths in ((5, 9), (1, 0), (-3, 4)):
        lens.copy_(torch.tensor(lengths))
        way.forget()
        with mock.patch.object(way, "validate", wraps=way.validate) as validated:
            result = program(q, *cache, lens, **options)
        assert validated.call_count == 1
        assert_same_bits(result, paged_attention(q, *cache, lens, **options))
    assert counter.frame_count == 1
