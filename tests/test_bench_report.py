"""Reports of ``tritonattn bench``, what is made of them, and its command line; no GPU needed."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tritonattn
from tritonattn.bench import catalogue, command, plots, tables
from tritonattn.bench.compare import compare
from tritonattn.bench.report import OK, OWN, SKIPPED, WRONG, Report, Result, Row
from tritonattn.bench.roofline import Ceilings
from tritonattn.bench.timing import Timing
from tritonattn.device import interpreting


def timed(*rounds: float) -> Result:
    return Result(OK, timing=Timing("graph", [[us, us] for us in rounds], [3.0], [12.0]))


def a_report(us: float = 100.0, spread: float = 0.0) -> Report:
    decode = Row("decode x", "decode", "TB/s", 10**9, 4 * 10**8)
    decode.results = {
        OWN: timed(us - spread, us, us + spread),
        "fa3": timed(110.0, 110.0),
        "flashinfer": Result(WRONG, "out[0] is 1, not 2"),
        "vllm": Result(SKIPPED, "has no way to do: sinks"),
    }
    other = Row("decode y", "decode", "TB/s", 10**9, 10**8, plain="decode x")
    other.results = {OWN: timed(50.0), "fa3": timed(40.0)}
    sweep = Row("sweep-batch 1", "sweep-batch", "TB/s", 10**9, 10**8)
    sweep.results = {OWN: timed(30.0), "fa3": timed(60.0)}
    return Report(
        date="2026-01-02T03:04:05+00:00",
        device={"name": "A card"},
        versions={"torch": "2.11"},
        settings={},
        peers={"fa3": "0.0.3", "vllm": "not here: no module"},
        ceilings=Ceilings(read=4.2, copy=4.1, matmul=750.0),
        rows=[decode, other, sweep],
    )


def test_report_round_trips_through_json(tmp_path: Path):
    report = a_report()
    report.save(tmp_path / "new" / "report.json")
    assert Report.load(tmp_path / "new" / "report.json") == report
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-20], "not JSON"),
        (lambda text: "[]", "not written by"),
        (lambda text: text.replace('"schema": 1', '"schema": 99'), "schema 99"),
        (lambda text: text.replace('"flops"', '"flips"'), "damaged: KeyError 'flops'"),
    ],
)
def test_report_refuses_what_is_none(tmp_path: Path, change: Callable[[str], str], message: str):
    path = tmp_path / "old.json"
    path.write_text(change(a_report().to_json()))
    with pytest.raises(ValueError, match=message):
        Report.load(path)


@pytest.mark.parametrize(
    ("old", "new", "slower", "faster"),
    [
        ((100.0, 0.0), (102.0, 0.0), 0, 0),  # under three per cent
        ((100.0, 0.0), (104.0, 0.0), 1, 0),
        ((100.0, 2.0), (104.0, 3.0), 0, 0),  # within the noise of both
        ((100.0, 0.0), (90.0, 0.0), 0, 1),
    ],
)
def test_compare_calls_a_change_what_exceeds_the_noise(old, new, slower: int, faster: int):
    found = compare(a_report(*old), a_report(*new))
    assert (len(found.slower), len(found.faster)) == (slower, faster)
    assert len(found.changes) == 3


def test_compare_names_lost_rows_and_another_card():
    new = a_report()
    new.device["name"] = "Another card"
    new.rows[0].results[OWN] = Result(WRONG, "")
    new.ceilings = Ceilings(read=3.9, copy=4.1, matmul=750.0)
    found = compare(a_report(), new)
    assert found.lost == ["decode x"]
    assert found.remarks == [
        "another card: A card then, Another card now",
        "the card's own read 4.2 TB/s then, 3.9 now",
    ]


def test_tables_show_rates_ratios_and_wrong_results():
    table, sweep = tables.tables(a_report())
    row = dict(zip(table.head, table.rows[0], strict=True))
    assert row["case"] == "x"
    assert (row["µs"], row["TB/s"], row["% ceiling"]) == ("100.0", "4.00", "95")
    assert (row["eager µs"], row["host µs"], row["of plain"]) == ("12.0", "3.0", "-")
    assert (row["fa3"], row["flashinfer"]) == ("110.0 3.64", "WRONG")
    assert row["best peer / ours"] == "1.10 fa3"
    assert "vllm" not in row
    assert dict(zip(table.head, table.rows[1], strict=True))["of plain"] == "0.50"
    assert len({len(line) for line in table.lines()[1:]}) == 1
    assert sweep.title == "sweep-batch"


def test_tables_render_on_a_terminal():
    console = pytest.importorskip("rich.console").Console(width=160, record=True)
    console.print(tables.tables(a_report())[0].rich())
    assert "WRONG" in console.export_text()


def test_summary_has_means_and_least_ratios():
    text = "\n".join(tables.summary(a_report()))
    assert "decode: 0.938 x the best peer (geometric mean of 2 cases), least 0.800 (y)" in text
    assert "read 4.20 TB/s" in text
    notes = "\n".join(tables.notes(a_report()))
    assert "vllm skipped: has no way to do: sinks (decode x)" in notes
    assert "vllm: not here: no module" in notes


def test_plot_draws_bars_and_sweeps(tmp_path: Path):
    pytest.importorskip("matplotlib")
    plots.plot(a_report(), tmp_path / "new" / "bars.png")
    assert (tmp_path / "new" / "bars.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"cannot write 'bars\.doc'"):
        plots.check(Path("bars.doc"))


def test_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"tritonattn\[bench\]"):
        plots.check(Path("bars.png"))


# The command


def bench(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


def test_command_lists_cases_with_their_work(capsys: pytest.CaptureFixture[str]):
    assert bench("--list", "--case", "decode 1 x 128k") == 0
    *_, line, end = capsys.readouterr().out.splitlines()
    assert end.startswith("1 case;")
    assert line.split() == ["decode", "1", "x", "128k", "paged_attention", "2.147", "536.9"]


@pytest.mark.skipif(not interpreting(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("sweep", "first", "last"),
    [
        ("length", "1 x 1k keys", "1 x 256k keys"), ("batch", "1 x 4k keys", "256 x 4k keys"),
        ("prefill", "1 x 1k tokens", "1 x 256k tokens"), ("page", "pages of 1", "pages of 256"),
        ("window", "window 128", "window 32768"), ("ratio", "32/32 heads", "32/1 heads"),
        ("dim", "D 32", "D 256"), ("prefill-dim", "D 32", "D 256"),
    ],
)  # fmt: skip
def test_command_sweeps_a_size(
    sweep: str, first: str, last: str, capsys: pytest.CaptureFixture[str]
):
    assert sweep in catalogue.SWEEPS
    assert bench("--list", "--sweep", sweep) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "sweep-" in line]
    assert {row.split()[0] for row in rows} == {f"sweep-{sweep}"}
    assert first in rows[0]
    assert last in rows[-1]
    assert bench("--list", "--sweep", sweep, "--sweep", "batch", "--case", "spec") == 0
    assert len(capsys.readouterr().out.splitlines()) > len(rows)


def test_command_without_a_gpu_checks_and_gives_no_figures(capsys: pytest.CaptureFixture[str]):
    assert bench("--case", "smoke") == 0
    out = capsys.readouterr().out
    assert "nothing is timed" in out
    assert "4 of 4 right" in out
    assert "µs" not in out
    assert bench("--case", "smoke", "--json", "x.json") == 2
    assert "--json needs figures" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--case", "nonsense"), "no case is called 'nonsense'"),
        (("--against", "fa4"), "no peer is called 'fa4'"),
        (("--base", "missing.json"), "missing.json"),
    ],
)
def test_command_refuses_in_one_line(words, message: str, capsys: pytest.CaptureFixture[str]):
    assert bench(*words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_command_shows_an_earlier_report_against_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    a_report().save(old)
    a_report(120.0).save(new)
    assert bench("--show", str(old)) == 0
    assert bench("--show", str(new), "--base", str(old)) == 1
    assert "decode x: 100.0 -> 120.0 µs (+20.0 %, noise 3.0 %)" in capsys.readouterr().out


def test_bench_is_imported_by_nothing_but_the_command_line():
    root = Path(tritonattn.__file__).parent
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if parts[0] in ("bench", "cli.py", "__main__.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                assert not any("bench" in name.split(".") for name in names), path
