"""A report as a picture: bars against peers and ceiling, lines for sweeps.  Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import OWN, Report, Row

SWEEP = "sweep"


def require_matplotlib() -> None:
    """ImportError with the way out, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "--plot needs matplotlib, which is in the extra bench: pip install 'tritonattn[bench]'"
        ) from error


def plot(report: Report, path: Path) -> None:
    """Write one picture with a panel for each group that has figures."""
    require_matplotlib()
    from matplotlib.figure import Figure

    groups: dict[str, list[Row]] = {}
    for row in report.rows:
        if any(row.us_of(name) for name in row.results):
            groups.setdefault(row.group, []).append(row)
    everybody = dict.fromkeys([OWN, *(name for row in report.rows for name in row.results)])
    names = [name for name in everybody if any(row.us_of(name) for row in report.rows)]
    heights = [
        3.5 if group.startswith(SWEEP) else 0.8 + 0.16 * len(rows) * (1 + len(names))
        for group, rows in groups.items()
    ]
    figure = Figure(figsize=(11, sum(heights, 1.2)), layout="constrained")
    figure.suptitle(f"tritonattn on {report.device.get('name', '?')}, {report.date[:10]}")
    if groups:
        panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (group, rows) in zip(panels, groups.items(), strict=True):
            (_lines if group.startswith(SWEEP) else _bars)(axes, rows, names)
            axes.set_title(group, loc="left")
            _ceiling(axes, report, rows, vertical=not group.startswith(SWEEP))
            axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=120)


def _bars(axes: Any, rows: list[Row], names: list[str]) -> None:
    width = 0.85 / len(names)
    for i, name in enumerate(names):
        places = [(y, us) for y, row in enumerate(rows) if (us := row.us_of(name))]
        axes.barh(
            [y + (i - (len(names) - 1) / 2) * width for y, _ in places],
            [rows[y].rate(us) for y, us in places],
            height=width,
            label=name,
            color=f"C{i}",
        )
    axes.set_yticks(range(len(rows)), [row.title for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(rows[0].unit)


def _lines(axes: Any, rows: list[Row], names: list[str]) -> None:
    for i, name in enumerate(names):
        places = [(x, us) for x, row in enumerate(rows) if (us := row.us_of(name))]
        axes.plot(
            [x for x, _ in places],
            [rows[x].rate(us) for x, us in places],
            marker="o",
            markersize=3,
            label=name,
            color=f"C{i}",
        )
    axes.set_xticks(range(len(rows)), [row.title for row in rows], fontsize=8)
    axes.set_ylabel(rows[0].unit)


def _ceiling(axes: Any, report: Report, rows: list[Row], vertical: bool) -> None:
    if report.ceilings is None:
        return
    is_compute = rows[0].unit == "TFLOP/s"
    value = report.ceilings.matmul if is_compute else report.ceilings.read
    draw = axes.axvline if vertical else axes.axhline
    label = "bf16 matmul" if is_compute else "device read"
    draw(value, color="black", linestyle="--", linewidth=1, label=label)
