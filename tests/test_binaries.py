"""Repeated launches: all but the addresses of the first, whatever the call.

No GPU is needed: compiled kernels are stood in for by objects that note what they are run with.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from launches import ALL_CASES, Case, prepare

import tritonattn
from tritonattn import binaries, cache_rules, launch, scratch
from tritonattn import device as devices
from tritonattn.boxes import Box
from tritonattn.flash_attn import append

H200 = devices.target(90, name="NVIDIA H200", sm_count=132)


class Binary:
    """What triton.compile returns, as far as a launch asks of it."""

    function, packed_metadata = object(), object()
    n_regs, metadata = 100, SimpleNamespace(shared=40_000)

    def _init_handles(self) -> None:
        pass

    def __init__(self, name: str, log: list[tuple]) -> None:
        self.name, self.log = name, log

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.log.append(("first", self.name, *grid, flatten(args)))

    def run(self, x, y, z, stream, function, metadata, data, enter, leave, *args) -> None:
        assert (function, metadata) == (self.function, self.packed_metadata)
        assert (stream, data, enter, leave) == (7, None, None, None)
        self.log.append(("again", self.name, x, y, z, flatten(args)))


def flatten(arg: Any) -> list[object]:
    if isinstance(arg, tuple):
        return [leaf for part in arg for leaf in flatten(part)]
    if isinstance(arg, Box):
        return [arg.data_ptr(), arg.shape, arg.strides, arg.block_shape, repr(arg.layout)]
    return [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple]]:
    """Of launches as on an H200, with one buffer for all partial results."""
    launches: list[tuple] = []
    partial = torch.empty(1 << 26)
    monkeypatch.setattr(binaries, "_find", lambda kernel, *_: Binary(kernel.fn.__name__, launches))
    monkeypatch.setattr(devices, "describe", lambda _: H200)
    counters = torch.zeros(1 << 16, dtype=torch.int32)
    monkeypatch.setattr(launch, "take", lambda *_, **__: partial)
    monkeypatch.setattr(launch, "take_counters", lambda _, __, numel, **___: counters[:numel])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(devices, "current", lambda: 0)
    monkeypatch.setattr(devices, "empty", lambda *how: torch.empty_strided(*how[:2], dtype=how[2]))
    monkeypatch.setattr(devices, "stream_of", lambda _: 7)
    monkeypatch.setattr(devices, "is_capturing", lambda: False)
    with mock.patch.object(triton.runtime, "driver", SimpleNamespace(active=None)):
        forget()
        yield launches
        forget()


def forget() -> None:
    launch.forget()
    cache_rules._passed.clear()
    append._repeats.clear()


def results(result: Any) -> dict[int, str]:
    """What a call returns, by address."""
    tensors = result if isinstance(result, tuple) else (result,)
    return {x.data_ptr(): f"result {i}" for i, x in enumerate(tensors) if x is not None}


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
@torch.no_grad()
def test_repeat_runs_what_the_first_launch_ran(
    case: Case, log: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "lookup", case.configure)
    call = prepare(case, case.dtype)
    first, again = call(), call()  # both are kept, so that their addresses differ
    half = len(log) // 2
    assert half >= 1
    assert len(log) == 2 * half
    gathers = case.function == "gather_kv_cache"  # which is no part of a decode step
    for before, after in zip(log[:half], log[half:], strict=True):
        assert before[0] == "first"
        assert after[0] == ("first" if gathers else "again")
        assert before[1:5] == after[1:5]
        named = [results(first).get(leaf, leaf) for leaf in before[5]]
        assert named == [results(again).get(leaf, leaf) for leaf in after[5]]
        if not gathers and before is log[half - 1] and first is not None:
            assert "result 0" in named


def empty_calls() -> tuple[dict[str, Callable[..., Any]], dict[str, Callable[..., Any]]]:
    """Calls of attention, and of the other functions that launch, with nothing to write."""
    q, new = torch.empty(0, 8, 64), torch.empty(0, 2, 64)
    cache, ints = torch.empty(4, 16, 2, 64), torch.zeros(2, 300, dtype=torch.int32)
    starts, lens = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    keys, slots = torch.empty(9, 2, 64), torch.empty(0, dtype=torch.int64)
    none = lens[:0]
    paged = tritonattn.paged_attention
    return {
        "varlen": partial(tritonattn.varlen_attention, q, keys, keys, starts, starts),
        "varlen, no keys": partial(tritonattn.varlen_attention, q, new, new, starts, starts),
        "prefix": partial(
            tritonattn.prefix_attention, q, new, new, cache, cache, ints, starts, lens
        ),
        "paged": partial(paged, q, cache, cache, ints, lens, cu_seqlens_q=starts),
        "paged, no pages": partial(paged, q, cache[:0], cache[:0], ints, lens, cu_seqlens_q=starts),
        "paged, no sequences": partial(paged, q, cache, cache, ints[:0], none),
    }, {
        "merge": partial(tritonattn.merge_states, q.expand(3, -1, -1, -1), torch.empty(3, 8, 0)),
        "write": partial(tritonattn.write_kv_cache, new, new, cache, cache, slots),
        "gather": partial(
            tritonattn.gather_kv_cache, cache, cache, ints, lens, cu_seqlens_k=starts, total_k=0
        ),
        "append": partial(append.place, none, None, 1, 0, ints[:0], 16),
    }


@torch.no_grad()
def test_repeat_of_a_call_with_nothing_to_write_launches_nothing(log: list[tuple]) -> None:
    """The merging kernel does not run then, nor may what it would merge."""
    attention, others = empty_calls()
    for call in attention.values():
        for options in (
            {}, {"num_splits": 1}, {"num_splits": 3}, {"num_splits": 3, "return_lse": True},
            {"num_splits": 3, "out": torch.empty(0, 8, 64)},
        ):  # fmt: skip
            for _ in range(3):
                call(**options)
    for call in others.values():
        for _ in range(3):
            call()
    assert log == []


def decode() -> list[torch.Tensor]:
    q, cache = torch.empty(2, 8, 64), torch.empty(4, 16, 2, 64)
    ints = torch.zeros(2, 300, dtype=torch.int32)
    return [q, cache, cache, ints, ints[:, 0].contiguous()]


@pytest.mark.parametrize(
    "changed",
    [
        {"softmax_scale": 0.5}, {"softcap": 30.0}, {"window_size": (8, 0)},
        {"window_size": (9, 0)}, {"chunk_size": 8}, {"k_scale": 2.0}, {"v_scale": 2.0},
        {"num_splits": 2}, {"return_lse": True}, {"batch_invariant": True}, {"causal": False},
        {"sinks": torch.zeros(8)}, {"alibi_slopes": torch.zeros(16)[::2]},
        {"out": torch.empty(2, 8, 72)[..., :64]},
    ],
    ids=lambda changed: "-".join(f"{name}" for name in changed),
)  # fmt: skip
@torch.no_grad()
def test_paged_attention_repeats_no_launch_of_another_call(changed, log: list[tuple]) -> None:
    """Numbers, strides and options are looked at in every call: only addresses may differ."""
    args = decode()
    numbers = {
        "softmax_scale": 0.25, "softcap": 20.0, "window_size": (7, 0), "chunk_size": 16,
        "k_scale": 3.0, "v_scale": 3.0, "num_splits": 3,
    }  # fmt: skip
    other = {name: numbers[name] for name in changed if name in numbers}

    def launches(options: dict[str, Any]) -> tuple[set[str], list[tuple]]:
        """How they were made, and what they were."""
        log.clear()
        named = results(tritonattn.paged_attention(*args, **options))
        runs = [(*run[1:5], [named.get(leaf, leaf) for leaf in run[5]]) for run in log]
        return {how for how, *_ in log}, runs

    truth = []
    for options in (other, changed):
        launch.forget()
        truth.append(launches(options))
    assert truth[0][1] != truth[1][1]
    launch.forget()
    assert [launches(options) for options in (other, changed)] == truth
    for options, (_, runs) in zip((other, changed) * 2, truth * 2, strict=True):
        assert launches(options) == ({"again"}, runs)


@torch.no_grad()
def test_paged_attention_repeats_no_aligned_launch_for_rows_off_16_bytes(log: list[tuple]) -> None:
    args = decode()
    tritonattn.paged_attention(*args)
    moved = torch.empty(2 * 8 * 64 + 1)[1:].view(2, 8, 64)
    log.clear()
    tritonattn.paged_attention(moved, *args[1:])
    tritonattn.paged_attention(moved, *args[1:])
    assert [how for how, *_ in log][:1] == ["first"]
    assert [how for how, *_ in log][-1:] == ["again"]


@pytest.mark.parametrize("is_latent_first", [True, False])
@torch.no_grad()
def test_paged_attention_repeats_no_launch_of_values_that_lie_elsewhere(
    is_latent_first: bool, log: list[tuple]
) -> None:
    """Whether values lie in the keys is known by addresses, in which calls alike may differ."""
    q, _, _, *rest = decode()
    q, pools = q.bfloat16(), torch.empty(2, 4, 16, 2, 64, dtype=torch.bfloat16)
    pairs = [(pools[0], pools[i][..., :32]) for i in (0, 1)]
    assert pairs[0][1].stride() == pairs[1][1].stride()
    if not is_latent_first:
        pairs.reverse()

    def launches(pair: tuple[torch.Tensor, ...]) -> tuple[set[str], list[tuple]]:
        log.clear()
        named = results(tritonattn.paged_attention(q, *pair, *rest))
        return {how for how, *_ in log}, [
            (*run[1:5], [named.get(leaf, leaf) for leaf in run[5]]) for run in log
        ]

    truth = []
    for pair in pairs:
        launch.forget()
        truth.append(launches(pair)[1])
    launch.forget()
    assert [launches(pair) for pair in pairs] == [({"first"}, runs) for runs in truth]
    assert [launches(pair) for pair in pairs] == [({"again"}, runs) for runs in truth]


@torch.no_grad()
def test_paged_attention_copies_a_strided_query_scale_at_every_call(log: list[tuple]) -> None:
    """The kernel reads it packed, so no launch of it can be repeated by address."""
    args = decode()
    scale = torch.ones(2, 3)[:, 1]
    for _ in range(3):
        tritonattn.paged_attention(*args, query_scale=scale)
    assert {how for how, *_ in log} == {"first"}


@torch.no_grad()
def test_repeat_in_a_capture_takes_memory_of_its_own(
    log: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph's replays run beside eager calls of the stream that it was captured from."""
    places: list[scratch.Place] = []

    def take(place: scratch.Place, *_: object, **__: object) -> torch.Tensor:
        places.append(place)
        return torch.empty(1 << 20)

    args = decode()
    tritonattn.paged_attention(*args, num_splits=3)
    monkeypatch.setattr(launch, "take", take)
    for is_capturing in (False, True, True, False):
        monkeypatch.setattr(devices, "is_capturing", lambda now=is_capturing: now)
        tritonattn.paged_attention(*args, num_splits=3)
    assert [how for how, *_ in log] == ["first"] * 2 + ["again"] * 8
    assert [place.is_captured for place in places] == [False, True, True, False]
    assert places[0] is places[3]
    assert len(set(places)) == 3


@torch.no_grad()
def test_repeats_keep_no_tensor_alive(log: list[tuple]) -> None:
    args = decode()
    kept = weakref.ref(args[1])
    tritonattn.paged_attention(*args)
    tritonattn.paged_attention(*args)
    args.clear()
    log.clear()
    gc.collect()
    assert kept() is None


@torch.no_grad()
def test_repeat_goes_the_ordinary_way_where_a_hook_is_set(
    log: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profilers hang on to launches by Triton's hooks, which want what Triton itself gathers."""
    args = decode()
    tritonattn.paged_attention(*args, num_splits=1)
    for hook in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patched:
            patched.setattr(triton.knobs.runtime, hook, lambda metadata: None)
            log.clear()
            tritonattn.paged_attention(*args, num_splits=1)
            assert [how for how, *_ in log] == ["first"]
    log.clear()
    tritonattn.paged_attention(*args, num_splits=1)
    assert [how for how, *_ in log] == ["again"]


@torch.no_grad()
def test_repeat_is_forgotten_where_configurations_change(log: list[tuple]) -> None:
    args = decode()
    tritonattn.paged_attention(*args)
    log.clear()
    launch.forget()
    tritonattn.paged_attention(*args)
    assert log[0][0] == "first"


class Rows:
    """A tensor on a GPU, as far as scratch asks of it."""

    def __init__(self, index: int) -> None:
        self.index = index

    def get_device(self) -> int:
        return self.index

    def new_empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The current stream and whether it is being captured."""
    now = SimpleNamespace(stream=1, capturing=False)
    monkeypatch.setattr(devices, "stream_of", lambda _: now.stream)
    monkeypatch.setattr(devices, "is_capturing", lambda: now.capturing)
    monkeypatch.setattr(scratch, "_places", {})
    return now


def take(like: Rows, numel: int, **options: bool) -> torch.Tensor:
    return scratch.take(scratch.place_of(like), like, numel, **options)


def test_scratch_is_shared_by_the_calls_of_one_stream_alone(stream: SimpleNamespace) -> None:
    first = take(Rows(0), 1000)
    assert first.numel() >= 1000
    assert take(Rows(0), 900) is first
    stream.stream = 2
    second = take(Rows(0), 1000)
    assert second is not first
    assert take(Rows(1), 1000) is not second
    stream.stream = 1
    assert take(Rows(0), 1000) is first
    larger = take(Rows(0), 5000)
    assert larger.numel() >= 5000
    assert take(Rows(0), 1000) is larger


def test_scratch_of_a_captured_graph_is_its_own(stream: SimpleNamespace) -> None:
    eager = take(Rows(0), 1000)
    stream.capturing = True
    captured = [take(Rows(0), 1000) for _ in range(2)]
    assert len({eager.data_ptr(), *(x.data_ptr() for x in captured)}) == 3


def test_scratch_of_a_compiled_program_is_its_own(stream: SimpleNamespace) -> None:
    """It runs in the memory of a graph that is to be captured, and that takes it all back."""
    shared = take(Rows(0), 1000)
    assert take(Rows(0), 1000, shared=False) is not shared
    assert take(Rows(0), 1000) is shared


def test_scratch_keeps_nothing_large(stream: SimpleNamespace) -> None:
    large = scratch._LIMIT + 1
    assert take(Rows(0), large) is not take(Rows(0), large)
    assert [place.buffer for place in scratch._places.values()] == [None]


def test_binaries_are_left_to_the_process_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """triton 3.9 unloads a kernel's module when the kernel goes, which at the end is too late."""
    kernel = SimpleNamespace(module=object())
    monkeypatch.setattr(binaries, "_compiled", {(): kernel})
    binaries._leave_to_the_process()
    assert kernel.module is None
