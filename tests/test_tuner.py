"""The tuner with a clock that tells what it is told, and with real kernels on small inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

from tritonattn import ArgumentValueError, UnsupportedError, api, binaries, launch, settings
from tritonattn import device as devices
from tritonattn.inputs import cumulative
from tritonattn.plan import plan
from tritonattn.tuning import space, store, tables
from tritonattn.tuning.build import small_case
from tritonattn.tuning.compile import Report
from tritonattn.tuning.config import KernelConfig, invalid
from tritonattn.tuning.heuristics import heuristic
from tritonattn.tuning.models import PRESETS, Layer
from tritonattn.tuning.run import compare_all, tune_all
from tritonattn.tuning.search import (
    SWITCH,
    GpuLostError,
    Outcome,
    Progress,
    TuningError,
    tune,
)
from tritonattn.tuning.tasks import Shape, Task, tasks
from tritonattn.tuning.trials import Trials, job_of, wall_timer
from tritonattn.tuning.workers import Job, compile_all
from tritonattn.warmup import choices, warmup

H200 = devices.target(90, name="NVIDIA H200", sm_count=132)
TASK = Task(PRESETS["llama3-8b"][0], "decode", Shape(32, 1, 8192))
CANDIDATES = space.candidates(TASK.problem, H200)
DEFAULT = CANDIDATES[0]
FINE = Report(shared=50_000, registers=128, spill_bytes=0)


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the user's tables, empty; none are shipped."""
    monkeypatch.setattr(settings, "CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(store, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(store, "_unsaved", {})
    monkeypatch.setattr(tables, "_said", set())
    store.forget()
    yield tmp_path / "user"
    store.forget()


@dataclasses.dataclass
class Fake:
    """A backend whose kernels take ``us`` and are what ``report`` and ``wrong`` say."""

    us: Callable[[KernelConfig], float] = lambda _: 10.0
    report: Callable[[KernelConfig], Report | str] = lambda _: FINE
    wrong: Callable[[KernelConfig], str] = lambda _: ""
    compiled: list[KernelConfig] = dataclasses.field(default_factory=list)
    checked: list[KernelConfig] = dataclasses.field(default_factory=list)
    timed: list[KernelConfig] = dataclasses.field(default_factory=list)
    is_open: bool = False
    was_closed: bool = False

    def compile(
        self, task: Task, configs: Sequence[KernelConfig]
    ) -> Generator[tuple[KernelConfig, Report | str], None, None]:
        try:
            for config in random.Random(1).sample(configs, len(configs)):
                self.compiled.append(config)
                yield config, self.report(config)
        finally:
            self.was_closed = True

    @contextlib.contextmanager
    def session(self, task: Task) -> Iterator[Fake]:
        self.is_open = True
        try:
            yield self
        finally:
            self.is_open = False

    def check(self, config: KernelConfig) -> str:
        assert self.is_open
        self.checked.append(config)
        return self.wrong(config)

    def time(self, config: KernelConfig) -> float:
        assert self.is_open
        self.timed.append(config)
        return self.us(config)


def best_is(best: KernelConfig, us: float = 5.0) -> Callable[[KernelConfig], float]:
    return lambda config: us if config == best else 10.0


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


def test_tune_leaves_the_default_only_for_three_percent() -> None:
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


def test_tune_drops_losers_early_and_never_the_default() -> None:
    def us(config: KernelConfig) -> float:
        return 100.0 if config == DEFAULT else 10.0 + 3 * CANDIDATES.index(config)

    fake = Fake(us)
    outcome = tune(TASK, H200, fake)
    counts = {config: fake.timed.count(config) for config in CANDIDATES}
    assert outcome.best == CANDIDATES[1]
    assert counts[CANDIDATES[-1]] == 3
    assert counts[DEFAULT] == counts[CANDIDATES[1]] == max(counts.values()) > 20
    assert sum(counts.values()) < 8 * len(CANDIDATES)

    thorough = Fake(us)
    tune(TASK, H200, thorough, exhaustive=True)
    assert len({thorough.timed.count(config) for config in CANDIDATES}) == 1


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

    class Choosy(Fake):
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
    assert {"compile", "check", "time, round 1"} <= set(steps)
    assert progress.configs > 100


def test_tune_all_stops_where_the_gpu_is_lost_and_where_the_budget_ends() -> None:
    def lost(config: KernelConfig) -> str:
        raise GpuLostError("an illegal memory access")

    todo = tasks(PRESETS["smollm2"])[:3]
    run = tune_all(todo, H200, Fake(wrong=lost), lambda *_: None)
    assert "illegal" in run.lost
    assert run.left == todo
    run = tune_all(todo, H200, Fake(), lambda *_: None, budget=-1)
    assert run.left == todo


def test_compare_all_times_the_table_against_the_heuristic(user: Path) -> None:
    tuned = CANDIDATES[4]
    fake = Fake(lambda c: {tuned: 8.0, CANDIDATES[7]: 6.0}.get(c, 10.0))
    entry = dataclasses.replace(tune(TASK, H200, fake).entry(), config=tuned)
    store.record(H200, {TASK.key: entry})
    (comparison,) = compare_all([TASK], H200, fake)
    assert (comparison.us, comparison.heuristic_us) == (8.0, 10.0)
    assert comparison.found.origin == "tuned"
    (comparison,) = compare_all([TASK], H200, fake, exhaustive=True)
    assert comparison.best_us == 6.0


# The space


@pytest.mark.parametrize("arch", [75, 80, 90, 100, 120, "gfx942", "gfx1100"])
def test_candidates_are_valid_and_begin_with_the_heuristic(arch: int | str) -> None:
    device = devices.target(arch)
    for preset in PRESETS.values():
        for task in tasks(preset, dtype=torch.float16):
            try:
                default = heuristic(task.problem, device)
            except UnsupportedError:
                continue
            found = space.candidates(task.problem, device)
            assert found[0] == default
            assert len(set(found)) == len(found) <= 120
            assert not any(invalid(config, task.problem, device) for config in found)


def test_config_that_needs_more_registers_than_there_are_is_invalid_for_all() -> None:
    prefill = tasks(PRESETS["llama3-8b"], ["prefill"])[0].problem
    spills = KernelConfig(128, 128, 1, 4, 2)
    assert "registers" in invalid(spills, prefill, H200)
    assert not invalid(dataclasses.replace(spills, num_warps=8), prefill, H200)
    assert spills not in space.candidates(prefill, H200)
    amd = dataclasses.replace(devices.target("gfx942"), shared_memory=H200.shared_memory)
    assert not invalid(spills, prefill, amd)


# Real kernels, small inputs


SMALL = Task(Layer(4, 2, 16), "decode", Shape(2, 1, 40), torch.float16, page_size=8)
SIMPLE = KernelConfig(16, 16, 2, 4, 1)


def test_trials_apply_a_call_once_however_often_it_is_timed(device: torch.device) -> None:
    trials = Trials(SMALL, device, wall_timer, copies=2)
    before = [[x.clone() for x in args] for args, _ in trials.calls]
    args, options = trials.calls[0]
    once = api.paged_attention(*args, **(options | {"out": None})).clone()
    assert trials.check(SIMPLE) == ""
    for _ in range(3):
        assert trials.time(SIMPLE) > 0
    for (args, options), kept in zip(trials.calls, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(args, kept, strict=True))
        assert options["out"].isfinite().all()
    assert torch.allclose(trials.calls[0][1]["out"], once, atol=1e-3)
    with pytest.raises(UnsupportedError):
        trials.check(KernelConfig(16, 16, 4, 4, 1))  # more heads than a KV head has


@pytest.mark.parametrize("family", ["decode", "prefill"])
def test_trials_refuse_half_an_output_though_another_wrote_all_of_it(
    family: str, device: torch.device
) -> None:
    task = dataclasses.replace(SMALL, family=family, shape=Shape(2, 1 + (family != "decode"), 40))
    trials = Trials(task, device, wall_timer, copies=1)
    whole, half = KernelConfig(128, 64, 2, 4, 1), KernelConfig(128, 128, 2, 4, 1)
    real = trials.function
    size = [0]

    def lazy(*args, out: torch.Tensor, **options) -> None:
        if store.forced() != half or len(out) < size[0]:
            real(*args, out=out, **options)
            return
        written = out.clone()
        real(*args, out=written, **options)
        out[: len(out) // 2] = written[: len(out) // 2]

    trials.function = lazy
    assert trials.check(whole) == ""
    assert "nan" in trials.check(half)
    assert trials.check(whole) == ""
    trials._small.wrong = lambda _: ""  # type: ignore[method-assign]
    assert "not finite at full size" in trials.check(half)


def test_trials_refuse_wrong_values(device: torch.device) -> None:
    trials = Trials(SMALL, device, wall_timer, copies=1)
    real = trials.function
    trials.function = lambda *args, out, **options: real(*args, out=out, **options).mul_(1.01)
    assert "off by" in trials.check(SIMPLE)


def test_small_case_runs_the_binary_that_is_timed() -> None:
    """Split keys or not, and every option: another binary would be checked otherwise."""
    for preset in PRESETS.values():
        for task in tasks(preset):
            case = small_case(task, H200)
            splits = case.options.get("num_splits", 1)
            assert (splits > 1) == (plan(task.problem, H200).num_splits > 1)
            assert set(task.scalars) <= set(case.options)
            assert job_of(task, DEFAULT, H200).plan.num_splits == min(splits, 2)


def test_tuning_is_no_part_of_a_call() -> None:
    code = (
        "import sys, torch, tritonattn\n"
        "q, k, v = torch.randn(3, 4, 1, 16)\n"
        "starts = torch.tensor([0, 4], dtype=torch.int32)\n"
        "tritonattn.varlen_attention(q, k, v, starts, starts)\n"
        "loaded = {n for n in sys.modules if n.startswith('tritonattn.')}\n"
        "unwanted = ('search', 'trials', 'run', 'workers', 'cli', 'commands', 'bench', 'warmup')\n"
        "print([n for n in loaded if n.split('.')[1:2] + n.split('.')[2:] and\n"
        "       any(part in unwanted for part in n.split('.'))])\n"
    )
    env = os.environ | {"TRITON_INTERPRET": "1", "TRITONATTN_QUIET": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stdout + run.stderr


# Compiling in processes


class Bomb:
    """Ends the process that unpickles it, as a crash in the compiler would."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return os._exit, (1,)


def test_compile_all_survives_a_crash_and_reports_errors() -> None:
    good = job_of(SMALL, SIMPLE, devices.target(80))
    bad = good._replace(config=KernelConfig(16, 8, 2, 4, 1))  # tl.dot wants 16
    bomb = Job(Bomb(), SIMPLE, good.plan, good.device)  # type: ignore[arg-type]
    found = compile_all([bomb, good, bad], processes=2)
    assert found[bomb] == "crashed the compiler"
    report = found[good]
    assert isinstance(report, Report)
    assert 0 < report.registers <= 255
    assert isinstance(found[bad], str)
    assert "crashed" not in found[bad]
    assert compile_all([]) == {}


# Warming up


@pytest.mark.parametrize(
    ("family", "bounds"),
    [
        ("decode", (256, 1, 100_000, 256)),
        ("paged", (8, 512, 9000, 2048)),
        ("prefill", (9, 300, 700, 2700)),
    ],
)
@pytest.mark.parametrize("is_tuned", [False, True])
def test_warmup_covers_every_length_up_to_its_bounds(
    family: str, bounds: tuple[int, int, int, int], is_tuned: bool
) -> None:
    layer = PRESETS["qwen2-7b"][0]
    problem = next(t for t in tasks([layer]) if t.family == family).problem
    if is_tuned:
        rng = random.Random(5)
        for task in tasks([layer], [family]):
            found = space.candidates(task.problem, H200)
            entry = tune(task, H200, Fake(best_is(rng.choice(found)))).entry()
            store.record(H200, {task.key: entry})
    most_batch, most_q, most_k, most_total = bounds
    covered = set(choices(problem, H200, *bounds))
    assert len(covered) > 1
    rng = random.Random(0)
    for _ in range(1500):
        total_q = rng.choice((rng.randint(1, most_total), rng.randint(1, min(most_total, 70))))
        max_q = rng.choice((total_q, min(total_q, 1 << rng.randint(0, (most_q - 1).bit_length()))))
        max_q = 1 if family == "decode" else max_q
        fewest = -(-total_q // min(max_q, most_q))
        batch = rng.randint(fewest, max(fewest, min(total_q, most_batch)))
        max_k = rng.choice((rng.randint(1, most_k), rng.randint(1, 1000)))
        max_k *= most_batch if family == "prefill" and rng.random() < 0.5 else 1
        sized = dataclasses.replace(
            problem, batch=batch, total_q=total_q, max_q=max_q, max_k=max_k, capacity_k=max_k
        )
        splits = min(2, plan(sized, H200).num_splits)
        assert (store.find(sized, H200).config, splits) in covered, sized


def test_warmup_launches_what_later_calls_launch() -> None:
    """Calls as on an H200, listed and not run: after warming up none has a new binary."""
    launched: set[tuple] = set()

    def record(kernel, grid, args, constants, options, *_) -> None:
        launched.add((kernel, tuple(constants.values()), binaries._signature(args), options))

    dtype = torch.bfloat16
    layer = {"dtype": dtype, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    with (
        mock.patch.object(binaries, "launch", record),
        mock.patch.object(devices, "describe", return_value=H200),
    ):
        launch.forget()
        options = {"sinks": True, "k_scale": True, "block_table": torch.zeros(1, dtype=torch.int64)}
        cache = {"page_size": 16, "cache_dtype": torch.float8_e4m3fn}
        warmup("paged_attention", **layer, **cache, max_batch=40, max_seqlen_k=2000, **options)
        warmup("write_kv_cache", dtype=dtype, num_kv_heads=2, head_dim=64, page_size=16)
        warmup(api.varlen_attention, **layer, max_batch=3, max_seqlen_q=50, max_seqlen_k=50,
               return_lse=True, window_size=(7, 0))  # fmt: skip
        known = set(launched)
        assert len(known) > 4
        rng = random.Random(0)
        for _ in range(60):
            batch, k = rng.randint(1, 40), rng.randint(1, 2000)
            pages = -(-k // 16)
            pool = torch.zeros(1, 16, 2, 64, dtype=torch.float8_e4m3fn).expand(
                batch * pages, -1, -1, -1
            )
            table = torch.zeros(batch, pages, dtype=torch.int64)
            api.paged_attention(
                torch.empty(batch, 8, 64, dtype=dtype), pool, pool, table,
                torch.zeros(batch, dtype=torch.int32), sinks=torch.zeros(8, dtype=dtype),
                k_scale=torch.ones(2), max_seqlen_k=rng.choice((None, k)),
            )  # fmt: skip
            lens = [rng.randint(1, 50) for _ in range(rng.randint(1, 3))]
            q, k_new = (torch.empty(sum(lens), n, 64, dtype=dtype) for n in (8, 2))
            api.varlen_attention(
                q, k_new, k_new, cumulative(lens), cumulative(lens), return_lse=True,
                window_size=(99, 0), max_seqlen_q=rng.choice((None, max(lens))),
            )  # fmt: skip
        launch.forget()
    assert launched == known


def test_warmup_does_nothing_under_the_interpreter_and_says_so(
    device: torch.device, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cuda":
        pytest.skip("kernels are compiled here")
    monkeypatch.setattr(settings, "QUIET", False)
    layer = {"dtype": torch.float16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    assert warmup("paged_attention", **layer, max_seqlen_k=99) == 0
    assert "interpreter" in capsys.readouterr().err


def test_warmup_refuses_what_is_no_function_or_size() -> None:
    with pytest.raises(ArgumentValueError, match="paged_attention"):
        warmup("flash", dtype=torch.float16, num_kv_heads=1, head_dim=16)
    with pytest.raises(ArgumentValueError, match="max_batch"):
        warmup("varlen_attention", dtype=torch.float16, num_heads=1, num_kv_heads=1, head_dim=16,
               max_batch=0)  # fmt: skip


@pytest.mark.gpu
def test_warmup_leaves_nothing_to_compile(device: torch.device) -> None:
    layer = {"dtype": torch.float16, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    assert warmup("paged_attention", **layer, max_batch=16, max_seqlen_k=3000) > 0
    before = binaries.count()
    for batch, k in ((1, 1), (1, 3000), (7, 700), (16, 3000), (16, 20)):
        pages = -(-k // 16)
        pool = torch.randn(batch * pages, 16, 2, 64, dtype=torch.float16, device=device)
        table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
        q = torch.randn(batch, 8, 64, dtype=torch.float16, device=device)
        lens = torch.full((batch,), k, dtype=torch.int32, device=device)
        api.paged_attention(q, pool, pool, table, lens)
    assert binaries.count() == before
