"""What the tuner compiles, checks and times: real kernels on small inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from tuner import DEFAULT, H200, user_tables, wall_timer  # noqa: F401 -- a fixture

from tritonattn import UnsupportedError, api, binaries, launch
from tritonattn import device as devices
from tritonattn.plan import plan
from tritonattn.tuning import compile as compile_module
from tritonattn.tuning import space, store
from tritonattn.tuning import trials as trials_module
from tritonattn.tuning.build import build, small_case
from tritonattn.tuning.compile import Report
from tritonattn.tuning.config import KernelConfig
from tritonattn.tuning.heuristics import heuristic
from tritonattn.tuning.models import PRESETS, Layer
from tritonattn.tuning.tasks import Shape, Task, tasks
from tritonattn.tuning.trials import Right, Trials, job_of
from tritonattn.tuning.workers import Compilers, Job, compile_all

pytestmark = pytest.mark.usefixtures("user")


SMALL = Task(Layer(4, 2, 16), "decode", Shape(2, 1, 40), torch.float16, page_size=8)
SIMPLE = KernelConfig(16, 16, 2, 4, 1)


def test_trials_apply_a_call_once_however_often_it_is_timed(device: torch.device) -> None:
    trials = Trials(SMALL, device, wall_timer, copies=2)
    before = [[x.clone() for x in args] for args, _ in trials.calls]
    args, options = trials.calls[0]
    once = api.paged_attention(*args, **(options | {"out": None})).clone()
    assert trials.check(SIMPLE) == ""
    for _ in range(2):
        times = trials.time(SIMPLE)
        assert len(times) == len(SMALL.situations) == 2
        assert min(times) > 0
    for (args, options), kept in zip(trials.calls, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(args, kept, strict=True))
        assert options["out"].isfinite().all()
    assert trials.check(SIMPLE) == ""  # the last call had other lengths
    assert torch.allclose(trials.calls[0][1]["out"], once, atol=1e-3)
    with pytest.raises(UnsupportedError):
        trials.check(KernelConfig(16, 16, 4, 4, 1))  # more heads than a KV head has


@pytest.mark.parametrize("preset", ["llama3-8b", "deepseek-v3"])
def test_situations_are_calls_of_one_bucket_on_the_same_tensors(preset: str) -> None:
    for task in tasks(PRESETS[preset]):
        own, *others = task.situations
        assert own == task
        assert bool(others) == (task.shape.batch > 1 and not task.shape.chunk)
        for other in others:
            assert dataclasses.replace(other.problem, batch=task.problem.batch) == task.problem
            assert len(set(other.k_lens)) > 1
            assert max(other.k_lens) == task.shape.k
            assert all(q <= k for q, k in zip(other.q_lens, other.k_lens, strict=True))
            assert other.table_width == task.table_width


@pytest.mark.parametrize(
    ("family", "shape"),
    [("decode", Shape(3, 1, 40)), ("prefill", Shape(3, 40, 40)), ("prefix", Shape(3, 5, 40)),
     ("paged", Shape(3, 4, 40))],
)  # fmt: skip
def test_trials_time_the_heuristic_of_each_situation(
    family: str, shape: Shape, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same tensors but for their lengths; other configurations are timed as they are."""
    task = dataclasses.replace(SMALL, family=family, shape=shape)
    used: list[tuple[KernelConfig, list[int]]] = []
    trials = Trials(task, device, wall_timer, copies=1)
    other = KernelConfig(16, 32, 1, 4, 1)
    monkeypatch.setattr(
        trials_module, "heuristic", lambda p, _: trials.default if p == task.problem else other
    )
    checked: list[KernelConfig] = []
    monkeypatch.setattr(trials, "_check", lambda c: checked.append(c) or "wrong" * (c == other))
    assert trials.check(SIMPLE) == ""
    assert checked == [SIMPLE]
    assert trials.check(trials.default) == ("wrong" if family == "prefill" else "")
    assert set(checked) == {SIMPLE, trials.default} | ({other} if family == "prefill" else set())

    def note(*args, out: torch.Tensor, **options) -> None:
        config = store.forced()
        assert config is not None
        used.append((config, args[-1].tolist()))
        own, _ = trials.calls[0]
        assert all(a is b for a, b in zip(args[:-1], own, strict=False) if a.is_floating_point())

    trials.function = note
    trials.time(trials.default)
    trials.time(SIMPLE)
    lengths = {tuple(lens) for _, lens in used}
    assert len(lengths) == (2 if family == "prefill" else 1 + shape.batch)
    assert tuple(trials.calls[0][0][-1].tolist()) in lengths
    configs = [config for config, _ in used]
    differ = {other} if family == "prefill" else set()
    assert set(configs) == {trials.default, SIMPLE} | differ
    assert configs.count(SIMPLE) == configs.count(trials.default) + configs.count(other)


@pytest.mark.parametrize("family", ["decode", "prefill"])
def test_trials_refuse_half_an_output_though_another_wrote_all_of_it(
    family: str, device: torch.device
) -> None:
    task = dataclasses.replace(SMALL, family=family, shape=Shape(2, 1 + (family != "decode"), 40))
    trials = Trials(task, device, wall_timer, copies=1)
    whole, half = KernelConfig(128, 64, 2, 4, 1), KernelConfig(128, 128, 2, 4, 1)
    real = trials.function

    def lazy(*args, out: torch.Tensor, **options) -> None:
        if store.forced() != half:
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


def test_trials_refuse_what_reads_memory_that_no_visible_key_owns(device: torch.device) -> None:
    trials = Trials(SMALL, device, wall_timer, copies=1)
    real = trials.function

    def careless(q, k_cache, *args, out: torch.Tensor, **options) -> None:
        real(q, k_cache, *args, out=out, **options).add_(0 * k_cache.float().sum())

    trials.function = careless
    assert "is nan" in trials.check(SIMPLE)


def test_trials_run_the_small_inputs_once_for_buckets_that_share_them(
    device: torch.device,
) -> None:
    """What was wrong is run again; at full size all are."""
    right: Right = set()
    others = [Shape(2, 1, 40), Shape(3, 1, 90)]
    first, second = (
        Trials(dataclasses.replace(SMALL, shape=s), device, wall_timer, 1, right) for s in others
    )
    assert first.task.key != second.task.key
    seen: list[int] = []
    real, offset = first.function, 1.0

    def noted(q, *args, out: torch.Tensor, **options) -> None:
        seen.append(len(q))
        real(q, *args, out=out, **options).mul_(offset)

    first.function = second.function = noted
    offset = 1.5
    assert "off by" in first.check(SIMPLE)
    assert not right
    offset = 1.0
    assert first.check(SIMPLE) == second.check(SIMPLE) == ""
    assert seen == [3, 3, 2, 3]  # small and wrong; small; full size; the other's full size
    assert len(right) == 1
    other_dtype = dataclasses.replace(SMALL, dtype=torch.bfloat16)
    third = Trials(other_dtype, device, wall_timer, 1, right)
    third.function = noted
    assert third.check(SIMPLE) == ""
    assert seen[4:] == [3, 2]


def test_small_case_runs_the_binary_that_is_timed() -> None:
    """Split keys or not, and every option: another binary would be checked otherwise."""
    for preset in PRESETS.values():
        for task in tasks(preset):
            case = small_case(task, H200)
            cut = plan(task.problem, H200).cut
            # Left to the library, so few queries are shared out.
            assert case.options.get("num_splits", 0) == {"shares": 0, "": 1, "parts": 3}[cut]
            assert set(task.scalars) <= set(case.options)
            assert job_of(task, DEFAULT, H200).plan.cut == cut


def test_small_case_takes_several_tiles_and_ends_inside_them() -> None:
    for preset in PRESETS.values():
        for task in tasks(preset):
            case = small_case(task, H200)
            configs = space.candidates(task.problem, H200, exhaustive=True)
            keys, lengths = max(c.block_n for c in configs), case.k_lens
            assert max(lengths) > 2 * keys
            assert min(lengths) < 2
            assert not any(n % 16 == 0 for n in lengths if n)
            assert case.poison == "nan"
            if task.family == "decode":
                continue
            assert case.q_lens is not None
            rows = max(c.block_m // c.pack for c in configs)
            assert max(case.q_lens) > rows
            assert max(case.q_lens) % 16
            assert min(case.q_lens) == 1


@pytest.mark.parametrize("preset", PRESETS)
def test_binary_that_is_compiled_ahead_is_the_one_that_is_launched(preset: str) -> None:
    made: list[tuple] = []

    def note(kernel, args, constants, options, *_) -> None:
        made.append((kernel, tuple(constants.values()), binaries._signature(args), options))

    def launched(kernel, grid, args, constants, options, *_) -> None:
        note(kernel, args, constants, options)

    shapes = [Shape(1, 1, 600), Shape(64, 1, 8), Shape(1, 4, 600), Shape(2, 40, 40)]
    cpu = torch.device("cpu")
    for task in tasks(PRESETS[preset], shapes=shapes, cache_dtype=torch.float8_e4m3fn):
        config = heuristic(task.problem, H200)
        with (
            mock.patch.object(binaries, "launch", launched),
            mock.patch.object(binaries, "compile_for", note),
            mock.patch.object(compile_module, "report"),
            mock.patch.object(devices, "describe", return_value=H200),
            store.force(config),
        ):
            launch.forget()
            made.clear()
            compile_module.compile_attention(*job_of(task, config, H200))
            args, options = build(task, cpu)
            getattr(api, task.function)(*args, **options)
            launch.forget()
        assert made[0] == made[1], task


def test_tuning_is_no_part_of_a_call() -> None:
    code = (
        "import sys, torch, tritonattn\n"
        "q, k, v = torch.randn(3, 4, 1, 16)\n"
        "starts = torch.tensor([0, 4], dtype=torch.int32)\n"
        "tritonattn.varlen_attention(q, k, v, starts, starts)\n"
        "loaded = {n for n in sys.modules if n.startswith('tritonattn.')}\n"
        "unwanted = ('search', 'outcome', 'graphs', 'trials', 'run', 'workers', 'cli',\n"
        "            'commands', 'bench')\n"
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


def test_compile_all_survives_a_crash_and_reports_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
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
    kept = {path.suffix for path in tmp_path.rglob("*attention_kernel.*")}
    assert ".cubin" in kept
    assert not kept & {".ttir", ".ttgir", ".llir", ".ptx"}  # megabytes that nobody reads


def test_compilers_begin_with_what_is_foreseen_and_survive_its_crash() -> None:
    good = job_of(SMALL, SIMPLE, devices.target(80))
    bad = good._replace(config=KernelConfig(16, 8, 2, 4, 1))
    bomb = Job(Bomb(), SIMPLE, good.plan, good.device)  # type: ignore[arg-type]
    with contextlib.closing(Compilers(1)) as compilers:
        compilers.foresee([bad, good])
        begun = compilers._begun[good]
        assert [isinstance(report, str) for _, report in compilers.compile([bad])] == [True]
        assert isinstance(begun.result(60), Report)
        assert dict(compilers.compile([good])) == {good: begun.result()}
        compilers.foresee([bomb])
        (found,) = compilers.compile([bad])
        assert "crashed" not in found[1]  # it was another one that did
