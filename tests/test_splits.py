"""Cutting keys into pieces: what the device makes of its lengths, and that no result shows it."""

from __future__ import annotations

import dataclasses
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
from tritonattn import launch, plan, portable, scratch
from tritonattn.kernels.splits import Shares, Splits, find_piece, tiles_per_part
from tritonattn.kernels.tiles import Batch
from tritonattn.problem import MaskSpec, Problem
from tritonattn.testing import Case, check
from tritonattn.tuning.config import KernelConfig
from tritonattn.tuning.store import force

BLOCK_N, BLOCK_Q = 64, 16
ANYTHING = 1 << 30
H200 = devices.target(90, name="NVIDIA H200", sm_count=132)
MI300 = devices.target("gfx942", sm_count=304)
interpreted = pytest.mark.skipif(
    not devices.interpreting(), reason="calls a JIT function by itself, as only an interpreter can"
)


class Layout(NamedTuple):
    """The part of a Spec that the rule reads."""

    BLOCK_N: int
    HAS_CACHE: bool
    HAS_NEW: bool


class Piece(NamedTuple):
    sequence: int
    tile: int
    part: int
    parts: int
    keys: int
    first: int


@triton.jit
def piece_kernel(found, batch, shares, walks, BLOCK_Q: tl.constexpr, SPEC: tl.constexpr):
    number = tl.program_id(0)
    piece = find_piece(number, batch, shares, walks, BLOCK_Q, SPEC)
    tl.store(found + number * 6, piece.sequence)
    tl.store(found + number * 6 + 1, piece.tile)
    tl.store(found + number * 6 + 2, piece.part)
    tl.store(found + number * 6 + 3, piece.parts)
    tl.store(found + number * 6 + 4, piece.keys)
    tl.store(found + number * 6 + 5, piece.first)


@triton.jit
def part_kernel(found, tiles, splits):
    tl.store(found, tiles_per_part(tiles, splits))


def pieces(
    lens: list[int],
    shares: Shares,
    walks: int,
    q_lens: list[int] | None,
    padding: int = 0,
    bounds: tuple[int, int] = (0, ANYTHING),
) -> list[Piece]:
    """What the programs of a paged batch's grid do; those with nothing to do are left out."""
    starts, total_q = None, len(lens)
    tiles = len(lens)
    if q_lens is not None:
        starts = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        total_q = sum(q_lens) + padding
        tiles += total_q // BLOCK_Q + 1
    grid = shares.programs + tiles * walks
    found = torch.full((grid, 6), -1, dtype=torch.int32)
    bounds = (None, None) if starts is None else bounds
    batch = Batch(starts, torch.tensor(lens, dtype=torch.int32), len(lens), total_q, *bounds)
    piece_kernel[(grid,)](
        found, batch, shares, walks, BLOCK_Q=BLOCK_Q, SPEC=Layout(BLOCK_N, True, False)
    )
    everything = [Piece(*row) for row in found.tolist()]
    busy = [piece for piece in everything if piece.keys > 0]
    assert everything[: len(busy)] == busy  # the others come last, and leave
    return busy


def shares_of(programs: int, least: int = 8, residents: int = 0) -> Shares:
    return Shares(None, None, None, programs, residents or programs, least, ANYTHING)


@interpreted
@given(
    lens=st.lists(st.integers(-5, 9_000), min_size=1, max_size=9),
    queries=st.none() | st.lists(st.integers(0, 50), min_size=9, max_size=9),
    programs=st.sampled_from([1, 7, 24]),
    walks=st.sampled_from([1, 3]),
    least=st.sampled_from([1, 8]),
    alike=st.booleans(),
    padding=st.sampled_from([0, 20]),
)
@settings(max_examples=12)
def test_pieces_cover_every_tile_once(lens, queries, programs, walks, least, alike, padding):
    if alike:
        lens = [lens[0]] * len(lens)
    q_lens = None if queries is None else queries[: len(lens)]
    shares = shares_of(programs, least)
    found = pieces(lens, shares, walks, q_lens, padding)
    tiles: dict[tuple[int, int], list[Piece]] = {}
    for piece in found:
        tiles.setdefault((piece.sequence, piece.tile), []).append(piece)
    heights = [1] * len(lens) if q_lens is None else [-(-n // BLOCK_Q) for n in q_lens]
    heights.append(-(-padding // BLOCK_Q) if q_lens is not None else 0)  # rows past the last one
    assert set(tiles) == {(b, t) for b, n in enumerate(heights) for t in range(n * walks)}
    needed = [max(1, -(-n // BLOCK_N)) for n in lens] + [1]
    share = max(-(-sum(map(int.__mul__, heights, needed)) * walks // programs), least)
    merged: set[int] = set()
    for (b, _), own in tiles.items():
        parts = own[0].parts
        assert [piece.part for piece in own] == list(range(parts))
        assert len({piece.keys for piece in own}) == 1
        assert (parts - 1) * own[0].keys < needed[b] <= parts * own[0].keys  # none is empty
        assert own[0].keys <= max(share, least) + 1 or alike  # then all run side by side
        if parts > 1:
            assert own[0].keys >= min(least, needed[b]) // 2
            room = {piece.first + piece.part for piece in own}
            assert len(room) == parts
            assert not room & merged
            merged |= room
    assert all(0 <= slot < 2 * programs for slot in merged)


@interpreted
@pytest.mark.parametrize("batch", [8, 127, 130])
def test_one_long_sequence_is_cut_whatever_the_size_of_the_batch(batch: int) -> None:
    """vLLM's kernel does not split above a batch size, so that one long sequence runs alone."""
    found = pieces([1000] * (batch - 1) + [120_000], shares_of(64), 1, None)
    longest = [piece for piece in found if piece.sequence == batch - 1]
    assert len(longest) >= 32 * 120_000 // (1000 * (batch - 1) + 120_000)
    assert all(piece.parts == 1 for piece in found if piece.sequence < batch - 1)


@interpreted
def test_sequences_of_one_length_run_side_by_side() -> None:
    """No piece of one may wait for the end of another."""
    for batch, parts in ((1, 24), (3, 8), (5, 4), (23, 1), (24, 1), (30, 1)):
        found = pieces([24 * 8 * BLOCK_N - 3] * batch, shares_of(96, 1, residents=24), 1, None)
        assert {piece.parts for piece in found} == {parts}
        assert len(found) == batch * parts


@interpreted
def test_pieces_count_what_a_window_leaves_visible() -> None:
    """Behind a window a long sequence is a short one."""
    far = shares_of(24)
    near = far._replace(widest=4096)
    assert len(pieces([100_000, 9_000], far, 1, None)) > len(
        pieces([100_000, 9_000], near, 1, None)
    )
    assert max(piece.keys for piece in pieces([100_000], near, 1, None)) <= 4096 // BLOCK_N + 1


@interpreted
@pytest.mark.parametrize("padding", [0, 2, 30])
def test_pieces_are_of_the_sequences_that_a_launch_is_for(padding: int) -> None:
    """Two launches take each sequence once; the rows past the last one count as one more."""
    lens, q_lens = [900, 3, 500, 70, 0], [1, 3, 40, 16, 0]
    owners = []
    for bounds in ((0, 16), (17, ANYTHING)):
        found = pieces(lens, shares_of(5, 1), 2, q_lens, padding, bounds)
        owners.append({piece.sequence for piece in found})
    is_past_short = 0 < padding <= 16
    assert owners[0] == {0, 1, 3, *([5] if is_past_short else [])}
    assert owners[1] == {2, *([5] if padding > 16 else [])}


@interpreted
@pytest.mark.parametrize(("most", "fixed"), [(3, 0), (8, 0), (3, 32)])
def test_parts_are_equal_or_of_a_fixed_size(most: int, fixed: int) -> None:
    for tiles in (0, 1, 7, 8, 100):
        found = torch.zeros(1, dtype=torch.int32)
        part_kernel[(1,)](found, tiles, Splits(most, fixed))
        assert found.item() == (fixed or max(-(-tiles // most), 1))


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
    block_m=st.sampled_from([16, 64, 128]),
    gpu=st.sampled_from([H200, MI300]),
)
def test_plan_bounds_grid_scratch_and_counts(batch, queries, capacity, group, block_m, gpu) -> None:
    problem = decode(batch, capacity, queries=queries, group=group)
    chosen = plan.plan(problem, gpu, plan.PORTABLE)
    assert chosen.cut != "shares" or gpu.backend == "cuda"
    assert 1 <= chosen.num_splits <= plan.MAX_SPLITS
    if chosen.cut == "parts":
        assert chosen.num_splits * plan.MIN_SPLIT <= capacity
        assert chosen.num_splits * batch * 8 <= plan.FEW * gpu.sm_count
    if chosen.cut == "shares":
        config = KernelConfig(block_m, 64, 1, 4, 2)
        programs = portable.share_programs(chosen, config, problem)
        assert chosen.residents <= programs <= chosen.programs
        room = max(portable.SCRATCH, 2 * chosen.residents * block_m * 128)
        assert programs * 2 * block_m * 128 <= room
        # Key tiles are counted in int32.
        assert problem.total_q * 8 * group * (capacity // 16 + 2) < 1 << 31


def test_plan_leaves_a_prefill_that_fills_the_gpu_in_one_part() -> None:
    assert plan.plan(decode(1, 32 * 1024, queries=4096), H200, plan.PORTABLE).cut == ""


@pytest.fixture(params=[(2, 3), (20, 20)], ids=lambda numbers: f"{numbers[0]}-pieces")
def many_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans as for long contexts, at lengths that the interpreter can run."""
    pieces, residents = request.param
    for name, value in {"MIN_SPLIT": 16, "PIECES": pieces, "RESIDENT": residents}.items():
        monkeypatch.setattr(plan, name, value)
    monkeypatch.setattr(plan, "SHORT", 4096)
    launch.forget()
    yield
    launch.forget()


MIXED = [((70, 1, 0, 33), (1, 1, 0, 1)), ((90, 20), (1, 17)), ((-3, 80), (0, 2))]


@pytest.mark.usefixtures("many_pieces")
@every_function
@pytest.mark.parametrize("lens", MIXED, ids=lambda lens: "-".join(map(str, lens[0])))
@pytest.mark.parametrize(
    "options",
    [{}, {"window_size": (40, 0)}, {"chunk_size": 48, "return_lse": False}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_attention_by_pieces_equals_the_oracle(function, lens, options, device):
    k_lens, q_lens = lens
    if function in (VARLEN, PREFIX):  # whose lengths are sums, or counts of cached keys alone
        k_lens = tuple(max(n, q) for n, q in zip(k_lens, q_lens, strict=True))
    path = Path(function, num_splits=0, small_tiles=True)
    check_case(path, k_lens, q_lens, device, sinks=True, options=options)


@pytest.mark.parametrize("heads", [(1, 1), (4, 2)], ids=["1", "4/2"])
@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "ragged"])
def test_attention_by_groups_of_pieces_equals_the_oracle(heads, is_decode, device, monkeypatch):
    """More pieces than are merged at once."""
    for name in ("RESIDENT", "PIECES"):
        monkeypatch.setattr(plan, name, 256)
    monkeypatch.setattr(plan, "MIN_SPLIT", 16)
    monkeypatch.setattr(plan, "INTERPRETED", 1)
    launch.forget()
    length = 16 * (2 * portable.GROUP + 5) - 3
    q_lens = None if is_decode else (1, 2, 0)
    case = Case(
        "paged_attention", (length, 40, 5), q_lens, heads=heads, head_dims=(32, 32), sinks=True,
        poison="nan", options={"return_lse": True},
    )  # fmt: skip
    with force(KernelConfig(block_m=16, block_n=16, pack=1, num_warps=4, num_stages=1)):
        check(case, device=device)
    launch.forget()
    if devices.interpreting() and is_decode:
        shares = shares_of(256, 1)
        lens = [-(-n // 16) * BLOCK_N for n in case.k_lens]  # as many of that fixture's tiles
        found = pieces(lens, shares, heads[0], None)
        assert max(piece.parts for piece in found) > portable.GROUP


@pytest.mark.usefixtures("many_pieces")
@pytest.mark.parametrize("function", [PREFIX, "paged_attention"])
@pytest.mark.parametrize("padding", [0, 3, 50])
def test_attention_of_decodes_beside_a_chunk_equals_the_oracle(function, padding, device) -> None:
    """Two launches, each for sequences that the other leaves alone; the poisoned result shows rows
    that neither of them wrote."""
    case = Case(
        function, (37, 3, 130, 50, 77), (9, 3, 40, 0, 1), heads=(4, 2), head_dims=(32, 32),
        padding_rows=padding, sinks=True, poison="nan", options={"return_lse": True},
    )  # fmt: skip
    check(case, device=device)
    check(case, device=device, poison_out=False)


@pytest.mark.usefixtures("many_pieces")
def test_kinds_part_what_may_be_short_from_what_may_be_long(device: torch.device) -> None:
    gpu = devices.describe(device)
    chunk = dataclasses.replace(decode(64, 4096), is_decode=False, total_q=1087, max_q=1024)
    short, long = plan.kinds(chunk, gpu)
    assert (short.least_q, short.most_q + 1) == (0, long.least_q)
    assert short.problem.max_q == 1 < short.most_q < long.problem.max_q
    whole = {
        "all have one query": decode(64, 4096),
        "all are short": decode(64, 4096, queries=16),
        "all are as long as the bound": decode(8, 4096, queries=512),
        "there is one": decode(1, 4096, queries=512),
        "no neighbour may change the bits": dataclasses.replace(chunk, batch_invariant=True),
        "the caller cuts them": dataclasses.replace(chunk, num_splits=2),
        "without a cache": dataclasses.replace(chunk, cache_dtype=None, page_size=0),
    }
    for reason, problem in whole.items():
        assert plan.kinds(problem, gpu) == (plan.Kind(problem),), reason


@pytest.mark.usefixtures("many_pieces")
def test_the_oracle_tests_do_cut_keys(device: torch.device) -> None:
    """Else the tests above would show nothing."""
    chosen = plan.plan(decode(5, 160), devices.describe(device))
    assert chosen.cut == "shares"


@pytest.mark.skipif(devices.interpreting(), reason="on a CPU every call gets new counters")
def test_counters_are_zero_after_every_call(device: torch.device) -> None:
    """The next call counts from there."""
    like = torch.empty(1, device=device)
    path = Path("paged_attention", num_splits=0, small_tiles=True)
    check_case(path, (900, 3), (1, 1), device)
    assert not scratch.take_counters(scratch.place_of(like), like, 64).any()
