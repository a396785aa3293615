"""``tritonattn bench``: its cases, its checks of results, its timing with a fake clock."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_fakes import SHORT, FakeClock

from tritonattn import reference
from tritonattn.bench import catalogue, peers, session
from tritonattn.bench.cases import FP8, Case, lognormal, select, tiny
from tritonattn.bench.correctness import Oracle, Wrong, samples
from tritonattn.bench.gpu import LostError
from tritonattn.bench.inputs import build, copies
from tritonattn.bench.peers import layouts
from tritonattn.bench.report import FAILED, OK, OWN, SKIPPED, WRONG
from tritonattn.bench.session import run_case
from tritonattn.bench.timing import Timing, measure
from tritonattn.call import Call
from tritonattn.inputs import TENSORS

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"heads": (4, 2), "head_dims": (32, 16)}
VARLEN = Case("test", "varlen", "varlen_attention", (50, 7, 33), (50, 7, 33), **SMALL)
PREFIX = Case("test", "prefix", "prefix_attention", (24, 5), (39, 3), **SMALL)
DECODE = Case("test", "decode", "paged_attention", (50, 3), **SMALL)
MIXED = Case("test", "mixed", "paged_attention", (61, 17), (1, 9), page_size=7, **SMALL)
LATENT = Case("test", "latent", "paged_attention", (30, 9), latent=True, **SMALL)
FP8_DECODE = replace(DECODE, cache_dtype=FP8)
VARIANTS = [
    *(VARLEN, PREFIX, DECODE, MIXED, LATENT, FP8_DECODE),
    replace(VARLEN, causal=False),
    replace(VARLEN, window=9, softcap=20.0),
    replace(PREFIX, chunk=16, sinks=True),
    replace(MIXED, window=5, alibi=True, query_scale=True, lse=True),
]


def by_reference(case: Case, call: Call, **changes: Any) -> Any:
    """The whole oracle on a bench's call, rounded as a kernel's result is."""
    names = ["window_size", "chunk_size", "softcap", "alibi_slopes", "sinks", "query_scale"]
    names += ["causal", "k_scale", "v_scale", "return_lse"]
    names += ["cu_seqlens_q"] * (case.function == "paged_attention")
    options = {name: getattr(call, name) for name in names} | changes
    args = [getattr(call, name) for name in TENSORS[case.function]]
    result = getattr(reference, case.function)(*args, **options)
    return (result[0].to(case.dtype), result[1].float()) if case.lse else result.to(case.dtype)


# Cases


def test_catalogue_names_are_unique_and_plain_ones_exist():
    names = sorted(case.name for case in catalogue.ALL)
    assert all(a != b for a, b in pairwise(names))
    assert {case.plain for case in catalogue.ALL} - {""} <= set(names)


def test_catalogue_plain_case_differs_in_one_thing_only():
    by_name = {case.name: case for case in catalogue.ALL}
    for case in catalogue.ALL:
        if case.plain:
            assert case.features - by_name[case.plain].features, case.name
            assert case.k_lens == by_name[case.plain].k_lens
            assert case.heads == by_name[case.plain].heads


@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_case_work_matches_brute_force(case: Case):
    window = None if case.window is None else (case.window - 1, None)
    pairs, keys, new = 0, 0, 0
    for lq, lk in zip(case.queries, case.keys, strict=True):
        seen = reference.visible(lq, lk, case.causal, window, case.chunk)
        pairs += int(seen.sum())
        keys += int(seen.any(0).sum())
        new += int(seen.any(0)[lk - lq :].sum()) if case.function == "prefix_attention" else 0
    (heads, kv_heads), (dim, dim_v) = case.heads, case.head_dims
    assert case.pairs == pairs
    assert case.flops == pairs * heads * (2 * dim + 2 * dim_v)
    cached = 1 if case.cache_dtype else 2
    width = kv_heads * (dim if case.latent else dim + dim_v)
    moved = width * (cached * (keys - new) + 2 * new)
    moved += case.total_q * heads * 2 * (dim + dim_v) + 4 * heads * case.total_q * case.lse
    assert case.bytes == moved


def test_case_rate_is_in_its_unit():
    prefill, decode = (select(catalogue.ALL, [name])[0] for name in ("4 x 4k", "1 x 128k"))
    assert prefill.unit == "TFLOP/s"
    assert prefill.rate(1000.0) == pytest.approx(2 * 2 * 32 * 128 * 4 * 4096 * 4097 / 2 / 1e9)
    assert decode.unit == "TB/s"
    assert decode.rate(100.0) == pytest.approx(131_072 * 8 * 128 * 2 * 2 / 1e8, rel=1e-3)


def test_lognormal_lengths_are_always_the_same():
    assert sum(lognormal(64, 262_144)) == 262_144
    assert lognormal(32, 16_384) == lognormal(32, 16_384)
    assert min(lognormal(64, 262_144)) >= 1


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("spec", ["spec 16 x 4 queries on 8k"]),
        ("1 x 8k", ["decode 1 x 8k"]),
        ("1 \N{MULTIPLICATION SIGN} 8K", ["decode 1 x 8k"]),
        ("64 mixed, page*6", ["decode 64 mixed, page 256"]),
        ("softcap", ["prefill 4 x 4k, softcap 50", "decode 32 x 8k, softcap 50"]),
    ],
)
def test_select_takes_groups_names_globs_and_parts(pattern: str, names: list[str]):
    assert [case.name for case in select(catalogue.ALL, [pattern])] == names


def test_select_names_the_pattern_that_fits_nothing():
    with pytest.raises(ValueError, match="no case is called 'decode 3 x 3'"):
        select(catalogue.ALL, ["spec", "decode 3 x 3"])


def test_tiny_keeps_what_a_case_is_about():
    for case in catalogue.ALL:
        small = tiny(case)
        assert small.features == case.features
        assert small.is_equal == case.is_equal
        assert sum(small.keys) <= 200
        assert small.heads[0] % small.heads[1] == 0
        assert small.name == case.name


# Correctness


@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_bench_oracle_accepts_the_reference(case: Case):
    call = build(case, CPU)
    Oracle(case, call).check(by_reference(case, call))


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (VARLEN, {"causal": False}),
        (replace(VARLEN, window=9), {"window_size": (9, 0)}),
        (replace(PREFIX, chunk=16), {"chunk_size": None}),
        (replace(MIXED, alibi=True), {"alibi_slopes": None}),
        (replace(MIXED, sinks=True), {"sinks": None}),
        (replace(VARLEN, query_scale=True), {"query_scale": None}),
        (replace(VARLEN, softcap=0.5), {"softcap": 0.0}),
        (FP8_DECODE, {"v_scale": None}),
    ],
    ids=str,
)
def test_oracle_refuses_an_option_that_was_ignored(case: Case, changes: dict[str, Any]):
    call = build(case, CPU)
    with pytest.raises(Wrong, match="sequence"):
        Oracle(case, call).check(by_reference(case, call, **changes), is_peer=True)


def test_oracle_refuses_a_value_that_was_not_written():
    call = build(VARLEN, CPU)
    out = by_reference(VARLEN, call)
    out[20, 1, 3] = torch.nan
    with pytest.raises(Wrong, match=r"1 of .* values are not finite"):
        Oracle(VARLEN, call).check(out)


def test_oracle_refuses_a_wrong_lse():
    case = replace(VARLEN, lse=True)
    call = build(case, CPU)
    out, lse = by_reference(case, call)
    with pytest.raises(Wrong, match="lse"):
        Oracle(case, call).check((out, lse * 1.01))


def test_samples_reach_the_ends_and_both_outer_kv_heads():
    case = replace(VARLEN, heads=(8, 8))
    chosen = samples(case)
    assert {s.sequence for s in chosen} == {0, 1, 2}
    assert any(s.start == 0 for s in chosen)
    assert any(s.start + s.rows == 50 for s in chosen)
    assert {0, 7} <= {s.kv_head for s in chosen}
    assert all(
        s.start + s.rows == 50
        for s in samples(replace(case, causal=False, window=4))
        if s.sequence == 0
    )


@pytest.mark.parametrize("length", [256, 300, 16384])
def test_samples_reach_across_the_seam_of_two_tiles_of_queries(length: int):
    chosen = samples(replace(VARLEN, k_lens=(length,), q_lens=(length,)))
    assert any((s.start + s.rows // 2) % 128 == 0 < s.start for s in chosen)
    assert all(0 <= s.start <= length - s.rows for s in chosen)


def test_copies_exceed_the_cache_and_share_no_keys():
    call = build(LATENT, CPU)
    several = copies(LATENT, call, l2_bytes=LATENT.bytes)
    assert len(several) == 3
    assert len({one.k_cache.data_ptr() for one in several if one.k_cache is not None}) == 3
    for one in several:
        assert one.v_cache is not None
        assert one.k_cache is not None
        assert one.v_cache.data_ptr() == one.k_cache.data_ptr()
        assert one.block_table is call.block_table


@pytest.mark.parametrize("case", [VARLEN, PREFIX, MIXED, LATENT], ids=str)
def test_layouts_hold_the_same_keys(case: Case):
    call = build(case, CPU)
    want = by_reference(case, call)
    k, v, cu_seqlens_k = layouts.packed(case, call)
    cu_seqlens_q = layouts.cumulative(case.queries)
    assert torch.equal(
        reference.varlen_attention(call.q, k, v, cu_seqlens_q, cu_seqlens_k).to(case.dtype), want
    )
    pool = layouts.paged(case, call)
    assert torch.equal(
        reference.paged_attention(call.q, *pool, cu_seqlens_q=cu_seqlens_q).to(case.dtype), want
    )


# One case with peers


def fake_peer(make: Callable[[Case, Call], Any]) -> Any:
    def prepare(case: Case, calls: Sequence[Call]) -> list[Callable[[], Any]]:
        return [lambda call=call: make(case, call) for call in calls]

    return SimpleNamespace(prepare=prepare)


def test_run_case_reports_every_peer_and_times_the_right_ones(device: torch.device):
    def unsupported(case: Case, call: Call) -> Any:
        peers.require(case)

    def broken(case: Case, call: Call) -> Any:
        raise RuntimeError("no kernel\nfor this")

    everybody = {
        "right": fake_peer(by_reference),
        "half": fake_peer(lambda case, call: by_reference(case, call) / 2),
        "unable": fake_peer(unsupported),
        "broken": fake_peer(broken),
    }
    clock = FakeClock()
    case = tiny(select(catalogue.ALL, ["smoke tiny decode"])[0])
    row = run_case(case, device, everybody, 0, clock, replace(SHORT, rounds=1, host_loops=1))
    states = {name: result.status for name, result in row.results.items()}
    assert states == {OWN: OK, "right": OK, "half": WRONG, "unable": SKIPPED, "broken": FAILED}
    assert row.results["unable"].note == "has no way to do: cached keys"
    assert row.results["broken"].note == "RuntimeError: no kernel for this"
    assert [name for name, result in row.results.items() if result.timing] == [OWN, "right"]


def lost(device: torch.device) -> None:
    raise LostError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("when", ["checked", "timed"])
def test_run_case_names_the_peer_that_broke_the_gpu(
    when: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    calls: list[str] = []

    def breaks(case: Case, call: Call) -> Any:
        calls.append("")
        if when == "checked" or len(calls) > 5:
            monkeypatch.setattr(session, "ensure_alive", lost)
            raise RuntimeError("no luck")
        return by_reference(case, call)

    turns: list[str] = []
    everybody = {
        name: fake_peer(f)
        for name, f in (("good", by_reference), ("peer", breaks), ("other", by_reference))
    }
    case = tiny(select(catalogue.ALL, ["smoke tiny decode"])[0])
    with pytest.raises(LostError, match=r"no luck \(CUDA error: an illegal") as caught:
        run_case(case, device, everybody, 0, FakeClock(), SHORT, turns.append)
    assert caught.value.culprit == "peer"
    if when == "checked":
        assert turns == [OWN, "good", "peer"]


@pytest.mark.parametrize(
    "name",
    ["smoke", "fp8 cache", "D 576/512", "64 mixed, page 12", "chunk 8192", "batch-invariant"],
)
def test_run_case_finds_this_package_right(name: str, device: torch.device):
    for case in select(catalogue.ALL, [name]):
        row = run_case(tiny(case), device, {}, 0, None, SHORT)
        assert row.results[OWN].status == OK, row.results[OWN].note


def test_peers_that_do_not_import_say_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)
    found, notes = peers.load(["fa2", "fa3"])
    assert list(found) == ["fa2"]
    assert notes["fa3"].startswith("not here: ")
    assert "\n" not in notes["fa3"]


def test_peers_are_chosen_by_name():
    assert peers.chosen(None) == list(peers.MODULES)
    assert peers.chosen(["fa3", " flashinfer"]) == ["fa3", "flashinfer"]
    assert peers.chosen(["none"]) == []
    with pytest.raises(ValueError, match="no peer is called 'fa4'"):
        peers.chosen(["fa4"])


def test_peers_refuse_what_they_cannot_compute():
    found, _ = peers.load(["fa2", "varlen"])
    window = replace(VARLEN, sinks=True, window=4)
    for module in found.values():
        with pytest.raises(peers.Unsupported, match="sinks"):
            module.prepare(window, [build(window, CPU)])
    mixed = replace(VARLEN, head_dims=(32, 32))
    with pytest.raises(peers.Unsupported, match="one length"):
        found["fa2"].prepare(mixed, [build(mixed, CPU)])


# Timing


def test_measure_gives_the_time_of_one_call_whatever_the_number_of_copies():
    clock = FakeClock()
    fast, slow = [clock.call("fast", 10.0)] * 3, [clock.call("slow", 900.0)]
    timings, failed = measure({"fast": fast, "slow": slow}, clock, SHORT)
    assert not failed
    assert timings["fast"].median == pytest.approx(10.0, abs=0.01)
    assert timings["slow"].median == pytest.approx(900.0, abs=0.01)
    assert [t.how for t in timings.values()] == ["graph", "graph"]
    assert len(timings["fast"].rounds) == SHORT.rounds
    assert timings["fast"].host == [5.0, 5.0]
    assert timings["fast"].eager_median == 10.0


def test_measure_interleaves_and_starts_each_round_with_another_candidate():
    clock = FakeClock()
    candidates = {name: [clock.call(name, 200.0)] for name in "abc"}
    measure(candidates, clock, SHORT)
    turns = [
        name for name, before in zip(clock.log, [None, *clock.log], strict=False) if name != before
    ]
    # Made ready, thrown away (starting with c, which was last), then the three rounds.
    assert "".join(turns).startswith("abc" + "ab" + "abc" + "bca" + "cab")


def test_measure_times_eagerly_what_cannot_be_captured():
    clock = FakeClock()
    timings, failed = measure({"odd": [clock.call("odd", 7.0, in_graph=False)]}, clock, SHORT)
    assert not failed
    assert timings["odd"].how == "events"
    assert timings["odd"].median == pytest.approx(7.0, abs=0.01)


def test_measure_goes_on_when_a_candidate_fails():
    clock = FakeClock()
    candidates = {
        "never": [clock.call("never", 5.0, dies=0)],
        "later": [clock.call("later", 50.0, dies=40)],
        "good": [clock.call("good", 50.0)],
    }
    timings, failed = measure(candidates, clock, SHORT)
    assert list(timings) == ["good"]
    assert set(failed) == {"never", "later"}


def test_measure_goes_on_when_a_candidate_fails_eagerly():
    clock = FakeClock()
    good, turns = clock.call("good", 50.0), []
    host_time = clock.host_time

    def failing(calls: Sequence[Any]) -> tuple[float, float]:
        if calls[0] is not good:
            raise RuntimeError("not eagerly")
        return host_time(calls)

    clock.host_time = failing  # type: ignore[method-assign]
    candidates = {"bad": [clock.call("bad", 50.0)], "good": [good]}
    timings, failed = measure(candidates, clock, SHORT, turns.append)
    assert list(timings) == ["good"]
    assert str(failed["bad"]) == "not eagerly"
    assert len(timings["good"].host) == SHORT.host_loops
    assert turns[-3:] == ["bad", "good", "good"]


def test_timing_noise_is_half_the_range_of_the_rounds():
    timing = Timing("graph", rounds=[[10.0, 10.0], [11.0, 11.0], [9.0, 10.0]])
    assert timing.median == 10.0
    assert timing.noise == pytest.approx((11.0 - 9.5) / 2 / 10.0)
