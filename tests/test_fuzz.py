"""``tritonattn fuzz``."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from tritonattn.case import Case
from tritonattn.cli import main
from tritonattn.commands import fuzz
from tritonattn.strategies import paged_cases, varlen_cases


def test_fuzz_draws_calls_and_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--minutes", "0.001", "--seed", "1", "--max-len", "9"]
    assert main(["fuzz", *arguments, "--function", "varlen_attention"]) == 0
    assert ", 0 failures" in capsys.readouterr().out


def test_fuzz_prints_a_failure_shrunk_as_a_call_to_paste(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Case] = []
    # A clock that counts calls, so that the draws are the same on a machine of any speed.
    monkeypatch.setattr(fuzz, "time", SimpleNamespace(monotonic=lambda: float(len(runs))))

    def test(case: Case) -> None:
        runs.append(case)
        if max(case.k_lens, default=0) > 5 and case.function == "paged_attention":
            raise AssertionError("out[0, 0, 0] is 1, not 2\ndetails")

    sources = [varlen_cases(max_len=20), paged_cases(max_len=20)]
    found = fuzz.hunt(sources, test, seed=1, seconds=2 * fuzz.BATCH)  # a batch of each
    said = capsys.readouterr().out
    assert found.examples == len(runs) > fuzz.BATCH
    (call,) = found.failures
    assert "k_lens=(6,)" in call
    assert "FAILURE 1: AssertionError: out[0, 0, 0] is 1, not 2" in said
    pasted = said[said.index("import torch") :].strip()
    checked: list[Case] = []
    monkeypatch.setattr("tritonattn.testing.check", lambda case, device: checked.append(case))
    exec(pasted, {})
    assert checked[0].k_lens == (6,)


def test_fuzz_tells_the_same_smallest_call_once(capsys: pytest.CaptureFixture[str]) -> None:
    def test(case: Case) -> None:
        raise AssertionError("always")  # whose smallest call is the smallest call there is

    found = fuzz.hunt([varlen_cases(max_len=9)] * 2, test, seed=1, seconds=0.5)
    assert len(found.failures) == 1
    assert capsys.readouterr().out.count("FAILURE") == 1


def test_fuzz_shows_what_fails_only_sometimes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Case] = []
    monkeypatch.setattr(fuzz, "time", SimpleNamespace(monotonic=lambda: float(len(runs))))

    def test(case: Case) -> None:
        runs.append(case)
        if len(runs) == 4:
            raise AssertionError("once")

    found = fuzz.hunt([varlen_cases(max_len=9)], test, seed=1, seconds=fuzz.BATCH)
    assert list(found.failures.values()) == ["AssertionError: once"]
    assert "import torch" in capsys.readouterr().out


def test_fuzz_stops_where_the_gpu_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    def test(case: Case) -> None:
        raise fuzz.GpuLost from RuntimeError("an illegal memory access was encountered")

    found = fuzz.hunt([varlen_cases(max_len=9)], test, seed=1, seconds=60)
    assert found.examples == 1
    assert "illegal memory access" in capsys.readouterr().out


def test_fuzz_names_the_extra_it_wants(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tritonattn.strategies")
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    assert main(["fuzz", "--minutes", "0.001"]) == 2
    assert "tritonattn[test]" in capsys.readouterr().err
