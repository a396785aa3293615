"""A report as text: rich tables on a terminal, aligned lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..console import columns
from .cases import Case
from .compare import Change, Comparison
from .report import FAILED, OWN, REPLACED, SKIPPED, WRONG, Report, Result, Row

NOTHING = "-"


@dataclass(frozen=True)
class Table:
    title: str
    head: list[str]
    rows: list[list[str]]  # the first column is text, the others are figures

    def lines(self) -> list[str]:
        """Aligned with spaces."""
        cells = [self.head, *self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.head))]
        text = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in cells
        ]
        return [self.title, *text]

    def rich(self) -> Any:
        """For rich's console, which must be as wide as ``lines``."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=self.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_edge=False
        )
        for i, name in enumerate(self.head):
            table.add_column(Text(name), justify="right" if i else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*(Text(cell, style=_style(cell)) for cell in row))
        return table


def _style(cell: str) -> str:
    return "bold red" if cell in (WRONG.upper(), FAILED.upper()) else ""


def microseconds(us: float) -> str:
    return f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def rate(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def tables(report: Report) -> list[Table]:
    """One for each group, in the order of the report."""
    groups = dict.fromkeys(row.group for row in report.rows)
    return [_table(report, group) for group in groups]


def _table(report: Report, group: str) -> Table:
    rows = [row for row in report.rows if row.group == group]
    named = dict.fromkeys(name for row in rows for name in row.results)
    shown = (WRONG, FAILED)
    peers = [
        name
        for name in named
        if name != OWN
        and any((r := row.results.get(name)) and (r.us or r.status in shown) for row in rows)
    ]
    has_plain = any(_of_plain(report, row) for row in rows)
    head = ["case", "µs", rows[0].unit, "% ceiling", "± %", "eager µs", "host µs"]
    head += ["of plain"] * has_plain + peers + ["best peer / ours"] * bool(peers)
    body = []
    for row in rows:
        own = row.results.get(OWN)
        cells = [row.title, *_own(own, row), _percent(row.part_of_ceiling(report.ceilings))]
        timing = own.timing if own and own.us else None
        cells.append(f"{100 * timing.noise:.1f}" if timing else NOTHING)
        hosts = (timing.eager_median, timing.host_median) if timing and timing.host else ()
        cells += [microseconds(us) for us in hosts] or [NOTHING] * 2
        if has_plain:
            part = _of_plain(report, row)
            cells.append(f"{part:.2f}" if part else NOTHING)
        cells += [_peer(row.results.get(name), row) for name in peers]
        if peers:
            ratio, best = row.ratio, row.best_peer
            cells.append(f"{ratio:.2f} {best[0]}" if ratio and best else NOTHING)
        body.append(cells)
    return Table(group, head, body)


def _own(result: Result | None, row: Row) -> tuple[str, str]:
    us = result.us if result else None
    if us is None:
        return (_state(result), NOTHING)
    return microseconds(us), rate(row.rate(us))


def _peer(result: Result | None, row: Row) -> str:
    us = result.us if result else None
    return _state(result) if us is None else f"{microseconds(us)} {rate(row.rate(us))}"


def _state(result: Result | None) -> str:
    return NOTHING if result is None or result.status == SKIPPED else result.status.upper()


def _percent(part: float | None) -> str:
    return NOTHING if part is None else f"{100 * part:.0f}"


def _of_plain(report: Report, row: Row) -> float | None:
    """Our rate here over our rate without the option, per visible pair or byte."""
    plain = report.row(row.plain) if row.plain else None
    if plain is None or not row.us or not plain.us:
        return None
    return row.rate(row.us) / plain.rate(plain.us)


def summary(report: Report) -> list[str]:
    """Ceilings, then of each group the geometric mean and the least of the ratios to peers."""
    lines = []
    for title, ceilings in (("before", report.ceilings), ("after", report.ceilings_after)):
        if ceilings is not None:
            lines.append(
                f"ceilings {title}: read {ceilings.read:.2f} TB/s, copy {ceilings.copy:.2f} TB/s, "
                f"bf16 matmul {ceilings.matmul:.0f} TFLOP/s"
            )
    for group in dict.fromkeys(row.group for row in report.rows):
        rows = [row for row in report.rows if row.group == group]
        ratios = {row.title: row.ratio for row in rows if row.ratio}
        if ratios:
            least = min(ratios, key=lambda title: ratios[title])
            lines.append(
                f"{group}: {geometric_mean(ratios.values()):.3f} x the best peer (geometric mean "
                f"of {len(ratios)} cases), least {ratios[least]:.3f} ({least})"
            )
    return lines


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


LEGEND = """\
µs: median of a call in replayed graphs, inputs not in L2; peers: µs and rate; ± %: half the range
of the rounds' medians; eager µs: a call in a loop without a graph; host µs: to issue one; of plain:
our rate over our rate without the option"""


def notes(report: Report) -> list[str]:
    """What the columns mean, the peers, and why results are missing, each reason once."""
    reasons: dict[str, list[str]] = {}
    for row in report.rows:
        for name, result in row.results.items():
            if result.timing is not None and result.timing.how != "graph":
                reasons.setdefault(f"{name} cannot be in a graph: timed eager", []).append(row.case)
            if result.note:
                reasons.setdefault(f"{name} {result.status}: {result.note}", []).append(row.case)
    lines = [*LEGEND.split("\n"), *(f"{name}: {note}" for name, note in report.peers.items())]
    for reason, cases in reasons.items():
        more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
        lines.append(f"{reason} ({cases[0]}{more})")
    for why in report.settings.get(REPLACED, []):
        lines.append(f"the process that uses the GPU was replaced: {why}")
    if any("fa3" in row.results for row in report.rows if row.unit == "TB/s"):
        lines.append("fa3 is given cached keys contiguous, not in pages")
    return lines


def comparison(found: Comparison, name: str) -> list[str]:
    """What changed since the report called ``name``."""

    def line(change: Change) -> str:
        return (
            f"  {change.case}: {microseconds(change.old_us)} -> {microseconds(change.new_us)} µs "
            f"({100 * (change.ratio - 1):+.1f} %, noise {100 * change.noise:.1f} %)"
        )

    lines = [f"against {name}: {len(found.changes)} cases in both", *map(str, found.remarks)]
    lines += [f"  {case}: no figure any more" for case in found.lost]
    for title, changes in (("slower", found.slower), ("faster", found.faster)):
        lines += [f"{title} than the noise: {len(changes)}", *map(line, changes)]
    return lines


def listing(cases: Sequence[Case]) -> str:
    """What would be run: the work of each case."""
    rows: list[Sequence[object]] = [("case", "function", "GFLOP", "MB")]
    for case in cases:
        work = (f"{case.flops / 1e9:.4g}", f"{case.bytes / 1e6:.4g}")
        rows.append((case.name, case.function, *work))
    return columns(rows)
