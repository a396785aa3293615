"""Compiled programs on a GPU: nothing waits for it, and its graphs replay what eager does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from traced import CALLS, IDS, assert_same_bits, decode_inputs, decode_step, public

from tritonattn import alibi_slopes, attention_temperature


@pytest.fixture(autouse=True)
def _forget_compiled_programs() -> None:
    torch._dynamo.reset()


def without_waiting(call: Any) -> Any:
    """The second result of ``call``, as compiling may wait; torch raises where that one does."""
    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("name", "build"), CALLS, ids=IDS)
def test_public_function_waits_for_nothing(name, build, compiled, device) -> None:
    (args, options), expected = build(device), build(device)
    function = public(name)
    run = torch.compile(function, fullgraph=True) if compiled else function
    result = without_waiting(lambda: run(*args, **options))
    for _ in range(2):
        expected_result = function(*expected[0], **expected[1])
    assert_same_bits(result, expected_result)
    assert_same_bits((args, options), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_small_tensors_are_made_without_waiting(compiled, device) -> None:
    def both(positions: torch.Tensor) -> Any:
        return alibi_slopes(6, device=device), attention_temperature(positions)

    positions = torch.arange(9000, device=device)
    run = torch.compile(both, fullgraph=True) if compiled else both
    slopes, factors = without_waiting(lambda: run(positions))
    assert slopes.log2().tolist() == [-2.0, -4.0, -6.0, -8.0, -1.0, -3.0]
    assert (factors[:8191] == 1.0).all()
    assert (factors[8191:] > 1.0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 3])
def test_compiled_cuda_graph_gives_eager_bits(splits, device) -> None:
    """Written caches and lengths change between replays of one graph."""

    def step(*inputs: Any) -> torch.Tensor:
        return decode_step(*inputs, num_splits=splits)

    q, k, v, pool, slots, *where = decode_inputs(3, 9, 4, device)
    caches, expected = ([x.clone() for x in pool.unbind(1)] for _ in range(2))
    for cache in caches:  # as a serving loop's are: at one place, not copied for each replay
        torch._dynamo.mark_static_address(cache)
    program = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    skipped = counters["inductor"]["cudagraph_skips"]
    with torch.inference_mode():
        for token in range(5):  # warm-up, capture, replays
            torch.compiler.cudagraph_mark_step_begin()
            result = program(q, k, v, caches, slots, *where)
            assert_same_bits(result, step(q, k, v, expected, slots, *where))
            assert_same_bits(caches, expected)
            q, k, v = q + token, k * 0.9, v - token
            slots, where[1] = slots + token % 2, where[1] + token % 2
    assert counters["inductor"]["cudagraph_skips"] == skipped
