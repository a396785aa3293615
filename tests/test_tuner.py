"""The search, with a clock that tells what it is told."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tuner import CANDIDATES, DEFAULT, FINE, H200, TASK, Fake, best_is, user_tables  # noqa: F401 -- a fixture

from tritonattn.tuning import space, store, tables
from tritonattn.tuning.compile import Report
from tritonattn.tuning.config import KernelConfig
from tritonattn.tuning.models import PRESETS
from tritonattn.tuning.outcome import SWITCH, Outcome
from tritonattn.tuning.run import AHEAD, compare_all, tune_all
from tritonattn.tuning.search import GpuLostError, Progress, TuningError, tune
from tritonattn.tuning.tasks import Shape, Task, tasks

pytestmark = pytest.mark.usefixtures("user")


# Choosing


@pytest.mark.parametrize("at", [1, 7, len(CANDIDATES) - 1])
def test_tune_finds_the_fastest(at: int) -> None:
    outcome = tune(TASK, H200, Fake(best_is(CANDIDATES[at])))
    assert (outcome.best, outcome.us) == (CANDIDATES[at], 5.0)
    assert (outcome.default, outcome.default_us, outcome.speedup) == (DEFAULT, 10.0, 2.0)
    assert outcome.key == TASK.key
    assert outcome.runner_up not in (None, outcome.best)
    assert outcome.runner_up_us == 10.0
    assert not outcome.refused


def test_tune_leaves_the_default_only_for_two_percent() -> None:
    other = CANDIDATES[5]
    barely = tune(TASK, H200, Fake(best_is(other, 10 * SWITCH + 0.01)))
    assert (barely.best, barely.fastest, barely.us) == (DEFAULT, other, 10.0)
    enough = tune(TASK, H200, Fake(best_is(other, 10 * SWITCH - 0.01)))
    assert enough.best == other


def test_tune_is_not_misled_by_one_lucky_sample_or_by_a_drift() -> None:
    rng = random.Random(3)
    best, calls = CANDIDATES[9], 0

    def us(config: KernelConfig) -> float:
        nonlocal calls
        calls += 1
        drift = 1 + 0.2 * math.exp(-calls / 100)  # clocks fall as the GPU warms up
        noise = 0.5 if config == CANDIDATES[4] and rng.random() < 0.2 else rng.uniform(1, 1.02)
        return (8.0 if config == best else 10.0) / drift * noise

    assert tune(TASK, H200, Fake(us)).best == best


def test_tune_leaves_the_default_only_for_what_wins_most_rounds() -> None:
    """Faster in the median by as much as you like, but slower in every other round."""
    wavers, steady = CANDIDATES[3], CANDIDATES[8]
    wave = itertools.cycle([5.0, 10.3])

    def us(config: KernelConfig) -> float:
        if config == wavers:
            return next(wave)
        return 9.7 if config == steady else 10.0

    outcome = tune(TASK, H200, Fake(us))
    assert (outcome.fastest, outcome.best) == (wavers, steady)


def test_tune_measures_against_the_default_in_the_same_round() -> None:
    """The clock falls to half in the middle: medians of a few rounds alone would decide by luck."""
    other, fake = CANDIDATES[6], Fake()

    def us(config: KernelConfig) -> float:
        slow = 2.0 if len(fake.timed) % 7 > 3 and len(fake.timed) < 60 else 1.0
        return (9.7 if config == other else 10.0) * slow * (1 + len(fake.timed) / 500)

    fake.us = us
    outcome = tune(TASK, H200, fake)
    assert outcome.best == other
    assert outcome.ratio == pytest.approx(0.97, abs=0.02)


def test_tune_wants_no_situation_slower() -> None:
    """Equal lengths and mixed ones, of which the latter take less time and count as much."""
    equal, both, mixed = CANDIDATES[2], CANDIDATES[5], CANDIDATES[9]
    times = {equal: (80.0, 20.6), both: (96.0, 19.4), mixed: (103.0, 17.0)}
    outcome = tune(TASK, H200, Fake(lambda config: times.get(config, (100.0, 20.0))))
    assert outcome.best == both
    assert (outcome.us, outcome.default_us) == (96.0, 100.0)
    assert outcome.ratio == pytest.approx((0.96 * 0.97) ** 0.5)


def test_entry_of_a_default_that_stays_names_no_configuration() -> None:
    stays = tune(TASK, H200, Fake()).entry()
    assert stays.config is None
    assert stays.gain == 1
    gone = tune(TASK, H200, Fake(best_is(CANDIDATES[3]))).entry()
    assert (gone.config, gone.gain) == (CANDIDATES[3], 2.0)


def test_tune_drops_losers_early_and_never_the_default() -> None:
    def us(config: KernelConfig) -> float:
        return 100.0 if config == DEFAULT else 10.0 + 3 * CANDIDATES.index(config)

    fake = Fake(us)
    outcome = tune(TASK, H200, fake, keep=CANDIDATES[-2])
    counts = {config: fake.timed.count(config) for config in CANDIDATES}
    assert outcome.best == CANDIDATES[1]
    assert counts[CANDIDATES[-1]] == 2
    assert counts[DEFAULT] == counts[CANDIDATES[1]] == counts[CANDIDATES[-2]] > 20
    assert sum(counts.values()) < 8 * len(CANDIDATES)
    assert set(outcome.times) == {c for c, count in counts.items() if count > 20}


def test_tune_tries_the_unlikely_where_that_is_asked_for() -> None:
    unlikely = set(space.candidates(TASK.problem, H200, exhaustive=True)) - set(CANDIDATES)
    best = max(unlikely, key=str)
    assert tune(TASK, H200, Fake(best_is(best))).best == DEFAULT
    assert tune(TASK, H200, Fake(best_is(best)), exhaustive=True).best == best


def test_tune_tries_what_is_known_already() -> None:
    prior = KernelConfig(32, 32, 4, 2, 7)
    assert prior not in CANDIDATES
    assert tune(TASK, H200, Fake(best_is(prior)), prior=[prior]).best == prior
    impossible = KernelConfig(128, 128, 4, 4, 3)  # from a table of another time
    assert tune(TASK, H200, Fake(), prior=[impossible]).best == DEFAULT


# What is refused


def test_tune_times_nothing_that_does_not_compile_fit_or_that_spills() -> None:
    reports: dict[KernelConfig, Report | str] = {
        CANDIDATES[1]: "RuntimeError: PassManager::run failed",
        CANDIDATES[2]: dataclasses.replace(FINE, shared=300_000),
        CANDIDATES[3]: dataclasses.replace(FINE, spill_bytes=64, spills_in_loops=8),
        CANDIDATES[4]: dataclasses.replace(FINE, tensor_memory=1024),
        CANDIDATES[5]: dataclasses.replace(FINE, spill_bytes=8),  # outside of loops: harmless
    }
    fake = Fake(report=lambda config: reports.get(config, FINE))
    outcome = tune(TASK, H200, fake)
    assert sorted(fake.compiled, key=str) == sorted(CANDIDATES, key=str)
    assert set(outcome.refused) == set(CANDIDATES[1:5])
    assert set(fake.checked) == set(fake.timed) == set(CANDIDATES) - set(CANDIDATES[1:5])
    assert "PassManager" in outcome.refused[CANDIDATES[1]]


def test_tune_takes_what_spills_least_where_everything_spills() -> None:
    def report(config: KernelConfig) -> Report:
        return dataclasses.replace(FINE, spills_in_loops=4 if config in CANDIDATES[3:6] else 9)

    fake = Fake(best_is(CANDIDATES[4]), report)
    assert tune(TASK, H200, fake).best == CANDIDATES[4]
    assert set(fake.timed) == {DEFAULT, *CANDIDATES[3:6]}


def test_tune_times_nothing_that_is_wrong_or_fails() -> None:
    def wrong(config: KernelConfig) -> str:
        if config == CANDIDATES[2]:
            raise RuntimeError("Triton Error [CUDA]: too many resources requested")
        return "out is off by 3" if config == CANDIDATES[1] else ""

    def us(config: KernelConfig) -> float:
        if config == CANDIDATES[3]:
            raise RuntimeError("out of memory")
        return 1.0 if config in CANDIDATES[1:3] else 10.0

    fake = Fake(us, wrong=wrong)
    outcome = tune(TASK, H200, fake)
    assert outcome.best == DEFAULT
    assert set(outcome.refused) == set(CANDIDATES[1:4])
    assert fake.timed.count(CANDIDATES[3]) == 1


def test_tune_can_do_without_the_default() -> None:
    fake = Fake(best_is(CANDIDATES[2]), wrong=lambda c: "wrong" if c == DEFAULT else "")
    outcome = tune(TASK, H200, fake)
    assert outcome.best == CANDIDATES[2]
    assert math.isnan(outcome.default_us)
    assert outcome.entry().default_us == outcome.us


def test_tune_says_why_where_nothing_works_and_leaves_the_table(user: Path) -> None:
    known = tune(TASK, H200, Fake(best_is(CANDIDATES[3]))).entry()
    (path,) = store.record(H200, {TASK.key: known})
    before = path.read_bytes()
    fake = Fake(
        report=lambda c: "ptxas fatal" if c in CANDIDATES[:9] else FINE,
        wrong=lambda _: "nan everywhere",
    )
    with pytest.raises(TuningError, match=r"none of \d+ .*9 x does not compile: ptxas fatal"):
        tune(TASK, H200, fake)
    saved: list[Outcome] = []
    run = tune_all([TASK], H200, fake, lambda _, outcome: saved.append(outcome))
    assert not saved
    assert not run.outcomes
    assert "nan everywhere" in run.failures[0][1]
    assert path.read_bytes() == before
    store.forget()
    assert store.lookup(TASK.problem, H200) == CANDIDATES[3]


def test_tune_refuses_a_call_whose_sequences_are_launched_apart() -> None:
    """What it measured would be looked up for one of the launches."""
    both = dataclasses.replace(TASK, family="paged", shape=Shape(63, 1, 4096, 1024))
    with pytest.raises(TuningError, match="launched apart"):
        tune(both, H200, Fake())


# Ending early


def test_tune_keeps_the_best_so_far_when_interrupted() -> None:
    best = CANDIDATES[6]
    fake = Fake()
    times = best_is(best)

    def us(config: KernelConfig) -> float:
        if len(fake.timed) > 3 * len(CANDIDATES) + 5:
            raise KeyboardInterrupt
        return times(config)

    fake.us = us
    outcome = tune(TASK, H200, fake)
    assert outcome.is_cut_short
    assert outcome.best == best
    assert not fake.is_open


@pytest.mark.parametrize("step", ["compile", "check"])
def test_tune_is_interrupted_before_there_is_anything(step: str) -> None:
    def stop(config: KernelConfig) -> str:
        raise KeyboardInterrupt

    fake = Fake(report=stop) if step == "compile" else Fake(wrong=stop)
    with pytest.raises(KeyboardInterrupt):
        tune(TASK, H200, fake)
    assert fake.was_closed  # and with it the processes that compile
    run = tune_all([TASK, TASK], H200, fake, lambda *_: None)
    assert run.is_interrupted
    assert len(run.left) == 2


def test_tune_ends_at_its_deadline_with_the_best_so_far() -> None:
    fake = Fake(best_is(CANDIDATES[6]))
    outcome = tune(TASK, H200, fake, deadline=-math.inf)
    assert outcome.is_cut_short
    assert outcome.best == CANDIDATES[6]
    assert len(fake.timed) == len(CANDIDATES)


def test_tune_all_saves_after_each_and_goes_on_after_a_failure(user: Path) -> None:
    todo = tasks(PRESETS["smollm2"])[:6]
    fakes = Fake(best_is(CANDIDATES[1]))
    steps: list[str] = []

    tried: dict[Task, int] = {}

    class Choosy(Fake):
        def compile(self, task, configs):
            tried[task] = len(configs)
            return super().compile(task, configs)

        @contextlib.contextmanager
        def session(self, task: Task) -> Iterator[Fake]:
            if task == todo[2]:
                raise torch.OutOfMemoryError("CUDA out of memory")
            with fakes.session(task):
                yield fakes

    def save(task: Task, outcome: Outcome) -> None:
        store.record(H200, {outcome.key: outcome.entry()})
        assert store.tuned(task.key, H200) is not None

    progress = Progress(lambda p: steps.append(p.step))
    run = tune_all(todo, H200, Choosy(), save, progress=progress)
    assert len(run.outcomes) == 5
    assert [task for task, _ in run.failures] == [todo[2]]
    assert sum(len(tables.read(path).entries) for path in user.rglob("*.json")) == 5
    assert {"compile", "check", "record", "time, round 1"} <= set(steps)
    assert set(progress.spent) == {"compile", "prepare", "check", "record", "time"}
    assert progress.configs == sum(n for task, n in tried.items() if task != todo[2])


def test_tune_all_stops_where_the_gpu_is_lost_and_where_the_budget_ends() -> None:
    def lost(config: KernelConfig) -> str:
        raise GpuLostError("an illegal memory access")

    todo = tasks(PRESETS["smollm2"])[:3]
    run = tune_all(todo, H200, Fake(wrong=lost), lambda *_: None)
    assert "illegal" in run.lost
    assert run.left == todo
    run = tune_all(todo, H200, Fake(), lambda *_: None, budget=-1)
    assert run.left == todo


def test_tune_all_lets_later_candidates_compile_while_one_is_timed() -> None:
    todo = tasks([layer for preset in PRESETS.values() for layer in preset])[: AHEAD + 8]
    seen: list[int] = []
    fake = Fake(wrong=lambda _: seen.append(len(fake.foreseen)) or "")
    tune_all(todo, H200, fake, lambda *_: None)
    assert seen[0] == AHEAD + 1
    assert fake.foreseen == todo
    budgeted = Fake()
    tune_all(todo, H200, budgeted, lambda *_: None, budget=-1)
    assert not budgeted.foreseen


def test_compare_all_times_the_table_against_the_heuristic(user: Path) -> None:
    tuned = CANDIDATES[4]
    fake = Fake(lambda c: {tuned: 8.0, CANDIDATES[7]: 6.0}.get(c, 10.0))
    entry = dataclasses.replace(tune(TASK, H200, fake).entry(), config=tuned)
    store.record(H200, {TASK.key: entry})
    (comparison,) = compare_all([TASK], H200, fake).found
    assert (comparison.us, comparison.heuristic_us) == (8.0, 10.0)
    assert comparison.found.origin == "tuned"
    assert comparison.ratio == pytest.approx(1.25)
    (comparison,) = compare_all([TASK], H200, fake, exhaustive=True).found
    assert comparison.regret == pytest.approx(1 / 3)


@pytest.mark.parametrize("exhaustive", [False, True])
def test_compare_all_keeps_what_it_has_when_it_is_interrupted(exhaustive: bool) -> None:
    todo = tasks(PRESETS["smollm2"])[:4]
    begun: list[Task] = []

    class Impatient(Fake):
        @contextlib.contextmanager
        def session(self, task: Task) -> Iterator[Fake]:
            begun.append(task)
            if len(begun) == 3:
                raise KeyboardInterrupt
            with super().session(task):
                yield self

    compared = compare_all(todo, H200, Impatient(), exhaustive=exhaustive, samples=2)
    assert [comparison.task for comparison in compared.found] == todo[:2]
    assert (compared.left, compared.is_interrupted) == (todo[2:], True)
    late = compare_all(todo, H200, Fake(), budget=-1)
    assert (late.found, late.left, late.is_interrupted) == ([], todo, False)


def test_compare_all_goes_on_after_a_failure_and_stops_where_the_gpu_is_lost() -> None:
    todo = tasks(PRESETS["smollm2"])[:4]
    errors = iter([ValueError("no room"), None, GpuLostError("an illegal memory access")])

    class Faulty(Fake):
        @contextlib.contextmanager
        def session(self, task: Task) -> Iterator[Fake]:
            if (error := next(errors)) is not None:
                raise error
            with super().session(task):
                yield self

    compared = compare_all(todo, H200, Faulty(), samples=2)
    assert compared.failures == [(todo[0], "ValueError: no room")]
    assert [comparison.task for comparison in compared.found] == todo[1:2]
    assert (compared.lost, compared.left) == ("an illegal memory access", todo[2:])
