"""Cutting keys into parts: what the device makes of its lengths, and that no result shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from faults import PREFIX, VARLEN, Path, check_case, every_function
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonattn import device as devices
from tritonattn import launch, plan
from tritonattn.kernels.splits import Splits, tiles_per_part
from tritonattn.kernels.tiles import Batch
from tritonattn.problem import MaskSpec, Problem

BLOCK_N = 64
ANYTHING = 1 << 30
H200 = devices.target(90, name="NVIDIA H200", sm_count=132)
interpreted = pytest.mark.skipif(
    not devices.interpreting(), reason="calls a JIT function by itself, as only an interpreter can"
)


class Layout(NamedTuple):
    """The part of a Spec that the rule reads."""

    BLOCK_N: int
    HAS_CACHE: bool
    HAS_NEW: bool


@triton.jit
def share_kernel(shares, tiles, batch, splits, walks, BLOCK_Q: tl.constexpr, SPEC: tl.constexpr):
    i = tl.program_id(0)
    share = tiles_per_part(tl.load(tiles + i), splits, batch, walks, BLOCK_Q, SPEC)
    tl.store(shares + i, share)


def parts(
    lens: list[int], asked: list[int], splits: Splits, walks: int, q_lens: list[int] | None = None
) -> list[tuple[int, int, int]]:
    """(tiles, tiles a part, parts) of the sequences ``asked`` for, of a paged batch of ``lens``."""
    tiles = [-(-max(lens[i], 0) // BLOCK_N) for i in asked]
    shares = torch.full((len(asked),), -1, dtype=torch.int32)
    starts = None
    if q_lens is not None:
        starts = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    batch = Batch(starts, torch.tensor(lens, dtype=torch.int32), len(lens), len(lens))
    share_kernel[(len(asked),)](
        shares, torch.tensor(tiles, dtype=torch.int32), batch, splits, walks,
        BLOCK_Q=16, SPEC=Layout(BLOCK_N, True, False),
    )  # fmt: skip
    return [(n, s, max(-(-n // s), 1)) for n, s in zip(tiles, shares.tolist(), strict=True)]


@interpreted
@given(
    lens=st.lists(st.integers(-5, 40_000), min_size=1, max_size=300),
    most=st.integers(2, 256),
    programs=st.sampled_from([0, 2, 264, 1000]),
    walks=st.sampled_from([1, 8, 71]),
    fixed=st.sampled_from([0, 0, 32]),
)
@settings(max_examples=40)
def test_parts_hold_all_keys_and_are_even(lens, most, programs, walks, fixed) -> None:
    least = 8
    even = sum(-(-max(n, 0) // BLOCK_N) for n in lens) * walks / programs if programs else 0
    splits = Splits(most, fixed, programs, least, ANYTHING)
    for tiles, share, count in parts(lens, list(range(len(lens)))[:3], splits, walks):
        assert share >= 1
        if fixed:
            assert share == fixed
            continue
        assert count <= most
        if not programs:
            assert share == max(-(-tiles // most), 1)
            continue
        if count > 1:
            assert share >= least  # a smaller part is not worth a program
            assert tiles > even  # nor is what is no longer than an even share worth merging
        if share != -(-tiles // most):  # there was room for as many parts as there should be
            assert share <= max(1.25 * max(even, least) + 1, 1)


@interpreted
@pytest.mark.parametrize("batch", [1, 8, 64, 255])
def test_one_long_sequence_is_cut_whatever_the_size_of_the_batch(batch: int) -> None:
    """vLLM's kernel does not split above a batch size, so that one long sequence runs alone."""
    lens = [1000] * (batch - 1) + [120_000]
    problem = decode(batch, 128 * 1024)
    chosen = plan.plan(problem, H200)
    least = chosen.least_keys // BLOCK_N
    splits = Splits(chosen.num_splits, 0, chosen.programs, least, ANYTHING)
    ((_, _, longest), (_, _, shortest)) = parts(lens, [batch - 1, 0], splits, problem.num_kv_heads)
    assert 2 <= longest <= chosen.num_splits
    assert batch == 1 or shortest <= 2


@interpreted
def test_parts_count_what_a_window_leaves_visible() -> None:
    """Behind a window a long sequence is a short one."""
    lens = [100_000] * 4
    far = Splits(64, 0, 264, 8, ANYTHING)
    near = far._replace(widest=4096)
    tiles = 4096 // BLOCK_N
    assert parts(lens, [0], far, 8)[0][2] > 1
    even = 4 * tiles * 8 / 264
    assert parts([4096] * 4, [0], near, 8)[0][1] <= max(1.25 * even + 1, 8)
    assert parts([4096] * 4, [0], near, 8) == parts([4096] * 4, [0], far, 8)


@interpreted
def test_parts_count_the_query_tiles_of_a_prefill_beside_decodes() -> None:
    lens, q_lens = [4096] * 9, [1] * 8 + [1024]  # 8 decodes, and 64 tiles of 16 queries
    splits = Splits(64, 0, 264, 8, ANYTHING)
    alone = parts(lens[:8], [0], splits, 8, q_lens[:8])[0]
    beside = parts(lens, [0], splits, 8, q_lens)[0]
    assert alone[2] > beside[2]


def decode(batch: int, capacity: int, *, queries: int = 1, group: int = 4) -> Problem:
    return Problem(
        "paged_attention", torch.bfloat16, torch.bfloat16, 128, 128, 8, group,
        mask=MaskSpec(has_right=True), cache_dtype=torch.bfloat16, page_size=16,
        is_decode=queries == 1, batch=batch, total_q=batch * queries, max_q=queries,
        capacity_k=capacity, max_k=capacity,
    )  # fmt: skip


@given(
    batch=st.integers(1, 5000),
    queries=st.sampled_from([1, 4, 17, 1000]),
    capacity=st.integers(1, 1 << 20),
    group=st.sampled_from([1, 4, 71]),
)
def test_plan_bounds_grid_and_scratch(batch, queries, capacity, group) -> None:
    problem = decode(batch, capacity, queries=queries, group=group)
    chosen = plan.plan(problem, H200)
    assert 1 <= chosen.num_splits <= plan.MAX_SPLITS
    if chosen.num_splits > 1:
        assert chosen.num_splits * plan.MIN_SPLIT <= capacity
        tiles = batch if queries == 1 else max(batch, -(-problem.total_q * group // 64))
        assert chosen.num_splits * tiles * 8 <= plan.CROWD * H200.sm_count
        numbers = chosen.num_splits * problem.total_q * 8 * group * 128
        few = tiles * 8 * 2 <= plan.BUSY * H200.sm_count
        assert numbers <= plan.SCRATCH or few


def test_plan_leaves_a_prefill_that_fills_the_gpu_in_one_part() -> None:
    assert plan.plan(decode(1, 32 * 1024, queries=4096), H200).num_splits == 1


@pytest.fixture
def many_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans as for long contexts, at lengths that the interpreter can run."""
    for name, value in {"MIN_SPLIT": 16, "CROWD": 4096, "BUSY": 64, "SHORT": 4096}.items():
        monkeypatch.setattr(plan, name, value)
    launch.forget()
    yield
    launch.forget()


MIXED = [((70, 1, 0, 33), (1, 1, 0, 1)), ((90, 20), (1, 17)), ((-3, 80), (0, 2))]


@pytest.mark.usefixtures("many_parts")
@every_function
@pytest.mark.parametrize("lens", MIXED, ids=lambda lens: "-".join(map(str, lens[0])))
@pytest.mark.parametrize(
    "options",
    [{}, {"window_size": (40, 0)}, {"chunk_size": 48, "return_lse": False}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_attention_parts_by_device_lengths_equal_the_oracle(function, lens, options, device):
    k_lens, q_lens = lens
    if function in (VARLEN, PREFIX):  # whose lengths are sums, or counts of cached keys alone
        k_lens = tuple(max(n, q) for n, q in zip(k_lens, q_lens, strict=True))
    path = Path(function, num_splits=0, small_tiles=True)
    check_case(path, k_lens, q_lens, device, sinks=True, options=options)


@pytest.mark.usefixtures("many_parts")
def test_the_oracle_tests_do_cut_keys(device: torch.device) -> None:
    """Else the tests above would show nothing."""
    chosen = plan.plan(decode(5, 160), devices.describe(device))
    assert chosen.num_splits > 1
    assert chosen.programs > 0
