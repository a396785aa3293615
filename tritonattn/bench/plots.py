"""A report as a picture: bars against peers and ceiling, lines for sweeps.  Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import OWN, Report, Row

SWEEP = "sweep"


def check(path: Path) -> None:
    """ImportError or ValueError if ``plot`` could not write there: before anything is measured."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "--plot needs matplotlib, which is in the extra bench: pip install 'tritonattn[bench]'"
        ) from error
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in kinds:
        raise ValueError(f"--plot cannot write {str(path)!r}: its kind must be of {sorted(kinds)}")


def plot(report: Report, path: Path) -> None:
    """Write one picture with a panel for each group that has figures."""
    check(path)
    from matplotlib.figure import Figure

    groups: dict[str, list[Row]] = {}
    for row in report.rows:
        if any(row.us_of(name) for name in row.results):
            groups.setdefault(row.group, []).append(row)
    peers = {name for row in report.rows for name in row.results if row.us_of(name)} - {OWN}
    colors = {name: f"C{i}" for i, name in enumerate([OWN, *sorted(peers)])}
    heights = [
        3.0 if group.startswith(SWEEP) else 0.7 + 0.24 * len(rows) for group, rows in groups.items()
    ]
    figure = Figure(figsize=(10, sum(heights, 0.6)), layout="constrained")
    figure.suptitle(f"tritonattn on {report.device.get('name', '?')}, {report.date[:10]}")
    if groups:
        panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (group, rows) in zip(panels, groups.items(), strict=True):
            (_lines if group.startswith(SWEEP) else _bars)(axes, rows, colors)
            _limit(axes, report, rows)
            axes.set_title(group, loc="left")
            axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _bars(axes: Any, rows: list[Row], colors: dict[str, str]) -> None:
    """Our rates as bars, each peer's as a mark on the same line."""
    for name, color in colors.items():
        places = [(row.rate(us), y) for y, row in enumerate(rows) if (us := row.us_of(name))]
        if not places:
            continue
        rates, lines = (list(part) for part in zip(*places, strict=True))
        if name == OWN:
            axes.barh(lines, rates, height=0.7, label=name, color=color, alpha=0.6)
        else:
            axes.plot(rates, lines, "|", markersize=11, markeredgewidth=2, label=name, color=color)
    axes.set_yticks(range(len(rows)), [row.title for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(rows[0].unit, fontsize=8)


def _lines(axes: Any, rows: list[Row], colors: dict[str, str]) -> None:
    """Everybody's times."""
    for name, color in colors.items():
        places = [(x, us) for x, row in enumerate(rows) if (us := row.us_of(name))]
        if places:
            axes.plot(*zip(*places, strict=True), marker="o", markersize=3, label=name, color=color)
    axes.set_xticks(range(len(rows)), [row.title for row in rows], fontsize=8)
    axes.set_yscale("log")
    axes.set_ylabel("µs", fontsize=8)


def _limit(axes: Any, report: Report, rows: list[Row]) -> None:
    """The card's own rate beside bars, the least time beside lines."""
    ceilings = report.ceilings
    if ceilings is None:
        return
    how: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1}
    if rows[0].group.startswith(SWEEP):
        floors = [ceilings.floor_us(row.bytes, row.flops) for row in rows]
        axes.plot(range(len(rows)), floors, label="the card's limit", **how)
        return
    is_compute = rows[0].unit == "TFLOP/s"
    rate = ceilings.matmul if is_compute else ceilings.read
    axes.axvline(rate, label="bf16 matmul" if is_compute else "device read", **how)
    axes.set_xlim(left=0)
