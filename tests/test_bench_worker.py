"""A whole run of ``tritonattn bench``, whatever becomes of the process that uses the GPU."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_fakes import CARD, CEILINGS, FAST, machine, machine_with_peers

from tritonattn.bench import catalogue, command, session, worker
from tritonattn.bench.cases import Case, select, tiny
from tritonattn.bench.gpu import LostError
from tritonattn.bench.report import FAILED, OK, OWN, SKIPPED, Report, Result, Row
from tritonattn.bench.tables import notes
from tritonattn.bench.worker import MOST_LOSSES, Hello, Runs, Server, Setup, Worker

CASES = [tiny(case) for case in select(catalogue.ALL, ["decode"])[:8]]
LOST = "CUDA error: an illegal memory access was encountered"


class Scripted:
    """Answers with rows of everybody, but for what ``does(case, who runs)`` raises."""

    started = 0
    peers = ("one", "two")

    def __init__(self, does: Callable[[Case, list[str]], str | None]) -> None:
        type(self).started += 1
        self.does, self.ended = does, ""
        self.hello = Hello(CARD, [*self.peers], dict.fromkeys(self.peers, "1.0"))

    def ask(self, what: str, *arguments: Any) -> Any:
        assert not self.ended
        if what != "row":
            return {"ceilings": CEILINGS, "compile_ahead": {}}[what]
        case, without = arguments
        running = [name for name in self.peers if name not in without]
        try:
            self.ended = self.does(case, running) or ""
        except LostError as error:
            self.ended = str(error)
            raise
        row = Row.of(case)
        row.results = {name: Result(OK) for name in [OWN, *running]}
        return row

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "started", 0)


def states(row: Row) -> dict[str, str]:
    return {name: result.status for name, result in row.results.items()}


def test_runs_measure_a_case_again_without_the_peer_that_broke_the_gpu():
    def does(case: Case, running: list[str]) -> None:
        if case is CASES[1] and "two" in running:
            raise LostError(LOST, "two")

    runs = Runs(partial(Scripted, does))
    rows = [runs.row(case) for case in CASES[:3]]
    right = {OWN: OK, "one": OK, "two": OK}
    assert [states(row) for row in rows] == [right, right | {"two": FAILED}, right]
    assert rows[1].results["two"].note == LOST
    assert Scripted.started == 2
    assert runs.replaced == [f"{CASES[1].name}, two: {LOST}"]


def test_runs_keep_a_row_whose_process_was_lost_behind_it():
    runs = Runs(partial(Scripted, lambda case, _: LOST if case is CASES[0] else None))
    assert [set(states(runs.row(case)).values()) for case in CASES[:2]] == [{OK}, {OK}]
    assert Scripted.started == 2
    assert runs.replaced == [f"after {CASES[0].name}: {LOST}"]


@pytest.mark.parametrize("culprit", ["", OWN])
def test_runs_blame_all_peers_if_nobody_is_known_and_then_this_package(culprit: str):
    def does(case: Case, running: list[str]) -> None:
        raise LostError(LOST, culprit)

    runs = Runs(partial(Scripted, does))
    row = runs.row(CASES[0])
    others = {} if culprit else {"one": FAILED, "two": FAILED}
    assert states(row) == {OWN: FAILED} | others
    assert Scripted.started == (1 if culprit else 2)


def test_runs_leave_out_a_peer_that_costs_too_many_processes():
    def does(case: Case, running: list[str]) -> None:
        if "one" in running:
            raise LostError(LOST, "one")

    runs = Runs(partial(Scripted, does))
    found = [runs.row(case).results["one"] for case in CASES]
    assert [result.status for result in found[: MOST_LOSSES + 1]] == [FAILED] * MOST_LOSSES + [
        SKIPPED
    ]
    assert {result.status for result in found[MOST_LOSSES:]} == {SKIPPED}
    assert f"in {MOST_LOSSES} cases before" in found[-1].note
    assert Scripted.started == 1 + MOST_LOSSES


def test_runs_go_on_without_what_else_cost_a_process(monkeypatch: pytest.MonkeyPatch):
    def crash(self: Scripted, what: str, *arguments: Any) -> Any:
        if what == "compile_ahead":
            self.ended = "the process ended by SIGSEGV"
            raise LostError(self.ended)
        return real(self, what, *arguments)

    real = Scripted.ask
    monkeypatch.setattr(Scripted, "ask", crash)
    runs = Runs(partial(Scripted, lambda *_: None))
    assert runs.ask("compile_ahead", CASES) is None
    assert runs.ask("ceilings") == CEILINGS
    assert set(states(runs.row(CASES[0])).values()) == {OK}
    assert runs.replaced == ["compile ahead: the process ended by SIGSEGV"]
    assert Scripted.started == 2


def test_runs_end_only_where_no_process_starts():
    def start() -> Scripted:
        if Scripted.started:
            raise LostError("the process ended with exit code 1")
        return Scripted(does)

    def does(case: Case, running: list[str]) -> None:
        raise LostError(LOST, "one")

    with pytest.raises(LostError, match="exit code 1"):
        Runs(start).row(CASES[0])


# In a process of its own


def test_worker_names_the_peer_that_ran_when_its_process_ended():
    """Real processes: one peer raises, one kills the process, one breaks the context."""
    case = tiny(select(catalogue.ALL, ["smoke tiny decode"])[0])
    setup = Setup(machine_with_peers, ("raises", "crashes", "breaks"), FAST)
    with contextlib.closing(Runs(partial(Worker, setup))) as runs:
        assert runs.hello.card == CARD
        assert runs.ask("ceilings") == CEILINGS
        row = runs.row(case)
        assert states(row) == {OWN: OK, "raises": FAILED, "crashes": FAILED, "breaks": FAILED}
        assert row.us == 500.0
        assert row.results["raises"].note == "RuntimeError: no kernel for this"
        assert row.results["crashes"].note == "the process ended by SIGKILL"
        assert row.results["breaks"].note == f"RuntimeError: CUDA error ({LOST})"
        assert [text.split(":")[0] for text in runs.replaced] == [
            f"{case.name}, crashes", f"{case.name}, breaks",
        ]  # fmt: skip


def test_worker_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch):
    with contextlib.closing(Worker(Setup(machine, (), FAST))) as asked:
        monkeypatch.setattr(worker, "TIME_LIMIT", 0.0)
        with pytest.raises(LostError, match="no answer within 0 seconds"):
            asked.ask("row", CASES[0], [])
        assert asked.ended


def test_worker_that_cannot_start_says_how_it_ended():
    with pytest.raises(LostError, match="the process ended with exit code 3"):
        Worker(Setup(partial(os._exit, 3), (), FAST))


# The command


class Here:
    """A worker in this process."""

    def __init__(self, setup: Setup) -> None:
        self.server, self.ended = Server(setup), ""
        self.hello = self.server.hello

    def ask(self, what: str, *arguments: Any) -> Any:
        answer = getattr(self.server, what)(*arguments)
        self.server.clean()
        return answer

    def close(self) -> None:
        pass


@pytest.fixture(name="bench")
def the_command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setattr(command, "interpreting", lambda: False)
    monkeypatch.setattr(command, "this_machine", machine)
    monkeypatch.setattr(command, "Worker", Here)
    monkeypatch.setattr(command, "QUICK", FAST)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return lambda *words: command.run(parser.parse_args([*map(str, words)]))


def test_command_measures_checks_and_writes_a_report(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "report.json"
    words = ["--case", "tiny decode", "--quick", "--rounds", "1", "--json", path]
    assert bench(*words, "--against", "fa2,fa3") == 0
    out = capsys.readouterr().out
    assert "A card: 1 cases against fa2" in out
    assert "[1/1] smoke tiny decode: tritonattn 500.0 µs" in out
    report = Report.load(path)
    assert report.device["name"] == "A card"
    assert report.ceilings_after == CEILINGS
    assert list(report.peers) == ["fa2", "fa3"]
    (row,) = report.rows
    assert row.us == 500.0
    assert row.results["fa2"].status == SKIPPED
    assert not [line for line in notes(report) if "replaced" in line]


def test_command_shows_its_whole_table_though_cases_lose_the_gpu(
    bench: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def does(case: Case, running: list[str]) -> None:
        if case.name == "smoke tiny decode" and "one" in running:
            raise LostError(LOST, "one")

    monkeypatch.setattr(command, "Worker", lambda setup: Scripted(does))
    path = tmp_path / "report.json"
    assert bench("--case", "smoke", "--check", "--json", path) == 0
    report, out = Report.load(path), capsys.readouterr().out
    names = [case.name for case in select(catalogue.ALL, ["smoke"])]
    assert [row.case for row in report.rows] == names
    assert f"one FAILED {LOST}" in out
    assert f"the process that uses the GPU was replaced: smoke tiny decode, one: {LOST}" in out


def test_command_says_so_where_no_process_can_use_the_gpu(
    bench: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def nothing(setup: Setup) -> None:
        raise LostError("the process ended with exit code 1")

    monkeypatch.setattr(command, "Worker", nothing)
    assert bench("--case", "smoke", "--against", "none") == 1
    assert "no process can use the GPU: the process ended" in capsys.readouterr().err

    def later(setup: Setup) -> Scripted:
        return nothing(setup) if Scripted.started else Scripted(does)  # type: ignore[return-value]

    def does(case: Case, running: list[str]) -> None:
        raise LostError(LOST, "one")

    monkeypatch.setattr(command, "Worker", later)
    path = tmp_path / "report.json"
    assert bench("--case", "smoke", "--json", path) == 1
    assert "no process can use the GPU any more" in capsys.readouterr().out
    assert Report.load(path).ceilings == CEILINGS


def test_command_reports_a_fault_of_its_own_as_ours_and_goes_on(
    bench: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    real = session.Oracle

    def faulty(case: Case, call: Any) -> Any:
        if case.name == "smoke tiny decode":
            raise ValueError("nothing fits")
        return real(case, call)

    monkeypatch.setattr(session, "Oracle", faulty)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench("--case", "smoke", "--check", "--against", "none") == 1
    captured = capsys.readouterr()
    assert "smoke tiny decode: tritonattn FAILED ValueError: nothing fits" in captured.out
    assert "Traceback" in captured.err
    assert captured.out.count("tritonattn right") == len(select(catalogue.ALL, ["smoke"])) - 1
