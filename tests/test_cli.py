"""The command line as a new user tries it, on whatever machine this is."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from tuner import H200, user_tables  # noqa: F401 -- a fixture

from tritonattn import __version__
from tritonattn import device as devices
from tritonattn.case import Case
from tritonattn.cli import COMMANDS, main
from tritonattn.commands import autotune
from tritonattn.console import columns
from tritonattn.plan import PORTABLE
from tritonattn.tuning import store, tables
from tritonattn.tuning.compile import Report
from tritonattn.tuning.config import KernelConfig
from tritonattn.tuning.keys import FAMILIES
from tritonattn.tuning.models import PRESETS
from tritonattn.tuning.tasks import Task, tasks

HAS_GPU = not devices.interpreting()
no_gpu = pytest.mark.skipif(HAS_GPU, reason="what is said where there is no GPU")


pytestmark = pytest.mark.usefixtures("user")


class Fake:
    """Compiles nothing; narrow tiles are fast."""

    def foresee(self, task: Task, configs: Sequence[KernelConfig]) -> None:
        pass

    def compile(
        self, task: Task, configs: Sequence[KernelConfig]
    ) -> Generator[tuple[KernelConfig, Report | str], None, None]:
        for config in configs:
            yield config, Report(50_000, 100, 0)

    @contextlib.contextmanager
    def session(self, task: Task) -> Iterator[Fake]:
        yield self

    def check(self, config: KernelConfig) -> str:
        return "wrong" if config.num_stages == 2 and config.kernel == PORTABLE else ""

    def time(self, config: KernelConfig, replays: int = 1) -> tuple[float, ...]:
        return (10.0 + config.block_n / 16 + config.num_warps,)


def tuned(count: int = 6) -> None:
    """Fill the user's tables of an H200."""
    assert autotune.measure(tasks(PRESETS["llama3-8b"])[:count], H200, Fake()) == 0


# The command itself


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr().out
    assert all(name in said for name in COMMANDS)
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"tritonattn {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tune"], "invalid choice"),
        (["explain", "--target", "sm_7"], "no GPU is known as sm_7"),
        (["explain", "--preset", "gpt9"], "gpt-oss"),
        (["explain", "--shape", "32@8"], "32x1@8k"),
        (["explain", "--shape", "1x9@8"], "Q at most K"),
        (["explain", "--page-size", "0"], "at least 1"),
        (["autotune", "--budget", "-1"], "above 0"),
        (["autotune", "--sample", "0"], "at least 1"),
        (["fuzz", "--minutes", "0"], "above 0"),
    ],
)
def test_arguments_that_are_wrong_are_explained(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain", "--preset", "custom"], "--heads 32/8"),
        (["explain", "--heads", "7/2", "--head-dims", "64"], "no multiple"),
        (["explain", "--heads", "8/2", "--head-dims", "640"], "576/512"),
        (["explain", "--heads", "8/1", "--head-dims", "64", "--latent"], "part of the keys"),
        (["explain", "--preset", "smollm2", "--heads", "8/2"], "custom"),
        (["explain", "--kernel", "decode", "--shape", "1x4@8"], "one query a"),
        (["explain", "--sms", "9"], "--target"),
        (["autotune", "--sms", "9"], "--target"),
        (["autotune", "--target", "sm_90", "--check"], "leave --check out"),
        (["autotune", "--check", "--output", "here"], "leave --output out"),
        (["bench", "--show", "old.json", "--case", "decode"], "leave --case out"),
        (["bench", "--list", "--json", "new.json"], "leave --json out"),
        (["bench", "--check", "--plot", "bars.png"], "leave --plot out"),
        (["cache", "import", "nowhere.json"], "nowhere.json"),
        (["cache", "diff", "nowhere"], "there is no nowhere"),
    ],
)
def test_arguments_that_contradict_are_explained(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "tritonattn", "--version"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == f"tritonattn {__version__}\n"


def test_missing_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ["autotune", "--plot", "x.png", "--dry-run", "--target", "sm_90"]
    assert main(arguments) == 2
    assert "tritonattn[bench]" in capsys.readouterr().err


def test_main_hands_bench_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list", "--case", "decode"]) == 0
    assert "decode" in capsys.readouterr().out


# doctor


def test_doctor_finds_this_machine_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "All is well" in said
    for function in ("varlen", "prefix", "paged"):
        assert f"{function}_attention agrees with the reference" in said
    assert ("interpreter" in said) == (not HAS_GPU)
    assert torch.__version__ in said


def test_doctor_sees_two_tritons_and_broken_tables(
    user: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"triton": ["triton", "pytorch-triton-rocm"]}
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: found)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "3.6.0")
    path = tables.path_of(user, "X", "decode")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert main(["doctor", "--json", "--no-run"]) == 1
    document = json.loads(capsys.readouterr().out)
    wrong = {f["what"]: f["text"] for f in document["findings"] if f["status"] == "wrong"}
    assert not document["ok"]
    assert set(wrong) == {"triton", "tables"}
    assert "pytorch-triton-rocm 3.6.0 and triton 3.6.0" in wrong["triton"]
    assert str(path) in wrong["tables"]


def test_doctor_and_fuzz_say_where_there_is_nothing_to_run_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor"]) == 1
    assert "forbids the interpreter" in capsys.readouterr().out
    assert main(["fuzz"]) == 2
    assert "forbids the interpreter" in capsys.readouterr().err


def test_doctor_reports_what_fails_and_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(case: Case, **_: object) -> None:
        if case.function == "prefix_attention":
            raise AssertionError("off by 3\nand more")
        if case.q_lens is None:
            raise RuntimeError("no kernel image")

    monkeypatch.setattr("tritonattn.testing.check", check)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "prefix_attention is not right: off by 3\n" in said
    assert "RuntimeError: no kernel image" in said
    assert "varlen_attention agrees" in said
    assert "2 of " in said


# explain


def test_explain_shows_the_whole_way_of_a_call_for_a_gpu_that_is_not_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--target", "sm_90", "--preset", "smollm2", "--kernel", "decode"]
    assert main(["explain", *arguments, "--shape", "1x1@8k"]) == 0
    said = capsys.readouterr().out
    for part in (
        "decode, 9/3 heads of 64, 1 x 1 on 8192", "pages of 16", "shares", "16 x 128 tile",
        "the heuristic", "for sm_90", "registers", "KiB shared memory", "spill",
    ):  # fmt: skip
        assert part in said, part
    assert "in loops" not in said  # triton 3.8 puts two registers aside around them


def test_explain_shows_one_call_of_each_kernel_and_cache(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--no-compile", "--cache-dtype", "same", "e4m3fn", "--page-size", "16", "64"]
    assert main(["explain", "--target", "sm_90", *arguments]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("call")]
    assert len(set(lines)) == len(lines) == 1 + 2 * 2 * (len(FAMILIES) - 1)  # prefill has no cache
    assert [line.split()[1] for line in lines[:4]] == ["prefill,", "prefix,", "decode,", "paged,"]
    assert lines[0].endswith("4 x 4096 on 4096")  # the most usual one


def test_explain_names_the_kernel_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "--preset", "llama3-8b", "--kernel", "prefill", "--shape"]
    assert main([*arguments, "4x1k@1k", "--target", "sm_90"]) == 0
    said = capsys.readouterr().out
    assert "kernel   prefill_kernel\n" in said
    assert "Hopper's kernel, 128 x 128 tile" in said
    assert "prefill_kernel for sm_90: 168 registers" in said
    for shape, target, reason in (
        ("9x16@16", "sm_90", ": sequences have 16 queries in the mean"), ("4x1k@1k", "sm_80", "\n")
    ):  # fmt: skip
        assert main([*arguments, shape, "--target", target, "--no-compile"]) == 0
        assert f"kernel   attention_kernel{reason}" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["80", "90", "sm_120", "gfx942"])
@pytest.mark.parametrize("preset", PRESETS)
def test_explain_knows_every_preset_on_every_kind_of_gpu(
    target: str, preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--target", target, "--preset", preset, "--no-compile"]) == 0
    assert capsys.readouterr().out.count("problem ") >= 2


def test_explain_says_which_table_a_configuration_is_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tuned()
    capsys.readouterr()
    arguments = ["explain", "--target", "90", "--no-compile", "--kernel", "decode", "--shape"]
    assert main([*arguments, "32x1@4k"]) == 0
    said = capsys.readouterr().out
    assert "user's table of NVIDIA H200, a related GPU's bucket" in said
    assert "µs, the default" in said
    assert main([*arguments, "1x1@128", "--dtype", "fp32"]) == 0
    assert "no table has this bucket" in capsys.readouterr().out


@no_gpu
def test_explain_without_a_gpu_says_what_it_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--preset", "custom", "--heads", "6/2", "--head-dims", "24/40"]) == 0
    said = capsys.readouterr().out
    assert "--target sm_90 explains for a GPU" in said
    assert "6/2 heads of 24/40" in said


def test_explain_shows_each_launch_of_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--target", "sm_90", "--no-compile", "--shape", "63x1+1024@4k"]
    assert main(["explain", "--kernel", "paged", *arguments]) == 0
    said = capsys.readouterr().out
    assert said.count("\nkernel   ") == said.count("\nconfig   ") == 2
    assert "launch   for sequences of at most 16 queries" in said
    assert "bucket   decode bf16 d128 group4 page16 causal q1 k4096 rows2048" in said
    assert "launch   for sequences of 17 queries or more" in said
    assert "bucket   paged bf16 d128 group4 page16 causal q1024 k4096 rows32768" in said


def test_explain_says_what_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    # Turing has 64 KiB of shared memory.
    arguments = ["--target", "sm_75", "--heads", "8/1", "--head-dims", "576/512", "--dtype", "fp32"]
    code = main(["explain", "--no-compile", "--kernel", "decode", *arguments])
    said = capsys.readouterr().out
    assert ("cannot run: paged_attention" in said) == (code == 1)


# autotune


def test_autotune_lists_what_it_would_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autotune", "--dry-run", "--target", "sm_90", "--preset", "gpt-oss"]) == 0
    said = capsys.readouterr().out
    assert "bf16 d64 group8 page16 window q1 k4096 rows2048" in said
    assert "52 buckets" in said
    assert main(["autotune", "--dry-run", "--target", "sm_90", "--sample", "3"]) == 0
    assert "\n3 buckets" in capsys.readouterr().out
    counts = []
    for more in ([], ["--exhaustive"]):
        assert main(["autotune", "--dry-run", "--target", "sm_90", *more]) == 0
        counts.append(int(capsys.readouterr().out.split(" configurations")[0].split()[-1]))
    assert counts[0] < counts[1]
    everything = ["--preset", "all", "--cache-dtype", "e4m3fn", "--batch-invariant"]
    assert main(["autotune", "--dry-run", "--target", "sm_90", *everything]) == 0
    assert "e4m3fn d128 group4 page16 causal invariant" in capsys.readouterr().out


def test_autotune_takes_several_caches_in_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    """All the first ones' first, then what is one step away from them."""
    arguments = ["--cache-dtype", "same", "e4m3fn", "--page-size", "16", "64", "--kernel", "decode"]
    assert main(["autotune", "--dry-run", "--target", "sm_90", *arguments]) == 0
    buckets = [line for line in capsys.readouterr().out.splitlines() if line.startswith("decode")]
    assert len(buckets) == 40
    where = [
        next(i for i, bucket in enumerate(buckets) if f"{cache}d128 group4 page{page} " in bucket)
        for cache, page in (("bf16 ", 16), ("e4m3fn ", 16), ("bf16 ", 64), ("e4m3fn ", 64))
    ]
    assert where == sorted(where)
    assert where[:2] == [0, 10]  # behind the shapes of the first, which share binaries


@no_gpu
def test_autotune_without_a_gpu_says_what_it_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autotune", "--kernel", "decode"]) == 2
    said = capsys.readouterr().out
    assert "nothing can be timed" in said
    assert "candidates" not in said  # of which there are none
    assert "\n10 buckets" in said


def test_autotune_writes_tables_and_says_what_they_gain(
    user: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    todo = tasks(PRESETS["llama3-8b"])[:6]
    plot = tmp_path / "gains.png" if importlib.util.find_spec("matplotlib") else None
    assert autotune.measure(todo, H200, Fake(), plot=plot) == 0
    said = capsys.readouterr().out
    assert "[6/6]" in said
    assert "x the default" in said
    assert "geometric mean 1." in said
    assert "seconds by step: compile " in said
    assert "refused" in said
    paths = sorted(user.rglob("*.json"))
    assert all(f"written: {path}\n" in said for path in paths)
    assert len(paths) == 4
    assert plot is None or plot.stat().st_size > 1000
    for task in todo:
        assert store.find(task.problem, H200).origin == "tuned"

    elsewhere = tmp_path / "elsewhere"
    assert autotune.measure(todo[:1], H200, Fake(), output=elsewhere) == 0
    assert [path.name for path in elsewhere.rglob("*.json")] == ["decode.json"]


def test_autotune_goes_on_with_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["autotune", "--dry-run", "--target", "90", "--missing"]
    with mock.patch.object(autotune.shapes, "device_of", return_value=H200):
        assert main(arguments) == 0
        assert "\n26 buckets" in capsys.readouterr().out
        tuned(6)
        capsys.readouterr()
        assert main(arguments) == 0
        assert "\n20 buckets" in capsys.readouterr().out
        tuned(26)
        capsys.readouterr()
        assert main(arguments) == 0
        assert "measured with these kernels already" in capsys.readouterr().out


def test_autotune_tells_failures_and_interruptions(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(Fake):
        def check(self, config: KernelConfig) -> str:
            return "NaN"

    class Stopped(Fake):
        def time(self, config: KernelConfig, replays: int = 1) -> tuple[float, ...]:
            raise KeyboardInterrupt

    todo = tasks(PRESETS["smollm2"])[:2]
    assert autotune.measure(todo, H200, Failing()) == 1
    assert "failed: " in capsys.readouterr().out
    assert autotune.measure(todo, H200, Stopped()) == 130
    assert "not reached: 2 buckets" in capsys.readouterr().out


def test_autotune_checks_tables_against_the_heuristic(capsys: pytest.CaptureFixture[str]) -> None:
    tuned()
    capsys.readouterr()
    todo = tasks(PRESETS["llama3-8b"])[:6]
    assert autotune.check(todo, H200, Fake()) == 0
    said = capsys.readouterr().out
    assert "% behind the tables in the median" in said
    assert said.count("tuned") >= 6
    assert autotune.check(todo[:2], H200, Fake(), exhaustive=True) == 0
    assert "at the 95th percentile" in capsys.readouterr().out


# cache


def test_cache_begins_empty(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "list"]) == 0
    said = capsys.readouterr().out
    assert "no tuned tables" in said
    assert str(user) in said
    assert main(["cache", "show"]) == 1
    assert main(["cache", "clear"]) == 0


def test_cache_moves_tables_between_machines(
    user: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned()
    capsys.readouterr()
    assert main(["cache", "list"]) == 0
    assert capsys.readouterr().out.count("NVIDIA H200") == 4
    assert main(["cache", "show", "--gpu", "NVIDIA H200", "--kernel", "decode"]) == 0
    said = capsys.readouterr().out
    assert "q1 k4096 rows1024" in said
    assert "x 32 tile" in said
    before = {path: path.read_bytes() for path in user.rglob("*.json")}

    file = tmp_path / "export.json"
    assert main(["cache", "export", str(file)]) == 0
    assert main(["cache", "diff", str(file), "user"]) == 0
    assert "6 buckets with the same" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 2  # no terminal to ask on
    assert main(["cache", "clear", "--kernel", "prefill", "--yes"]) == 0
    assert main(["cache", "diff", str(file), "user"]) == 0
    assert "4 buckets with the same" in capsys.readouterr().out
    assert main(["cache", "clear", "--yes"]) == 0
    assert not list(user.rglob("*.json"))
    assert main(["cache", "import", str(file)]) == 0
    assert {path: path.read_bytes() for path in user.rglob("*.json")} == before

    lone = tmp_path / "lone.json"
    lone.write_bytes(next(iter(before.values())))
    assert main(["cache", "import", str(lone)]) == 0


@pytest.mark.parametrize("text", ["", "[1", '{"tables": [{}]}', '{"tables": 3}', "\ufeff{}"])
def test_cache_imports_nothing_but_tables(
    text: str, user: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    assert main(["cache", "import", str(file)]) == 2
    assert str(file) in capsys.readouterr().err
    assert not user.exists()


def test_cache_list_names_what_cannot_be_used(
    user: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned()
    broken = next(user.rglob("decode.json"))
    broken.write_text("{")
    assert main(["cache", "list"]) == 1
    captured = capsys.readouterr()
    assert str(broken) in captured.err
    assert "prefill" in captured.out


def test_columns_align_numbers_to_the_right() -> None:
    rows = [("name", "µs", "gain"), ("a", "9.5", "1.05x"), ("longer", "110.0", "-")]
    lines = ["name       µs   gain", "a         9.5  1.05x", "longer  110.0      -"]
    assert columns(rows) == "\n".join(lines)
    assert columns([]) == ""
