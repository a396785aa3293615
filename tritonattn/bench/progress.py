"""How far a run is: a bar on a terminal, a line a case elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from .report import FAILED, OK, OWN, WRONG, Row
from .tables import Table, microseconds, rate


def has_rich_terminal() -> bool:
    """Whether to draw: a terminal, and rich is installed."""
    if not sys.stdout.isatty():
        return False
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True


def show(table: Table) -> None:
    lines = table.lines()
    if has_rich_terminal():
        from rich.console import Console

        console = Console()
        if console.width >= max(map(len, lines)):
            console.print(table.rich())
            return
    print("\n".join(lines), flush=True)


class Progress:
    """Prints as cases end; a context manager."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.bar: Any = None
        self.task: Any = None

    def __enter__(self) -> Progress:
        if has_rich_terminal():
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            description = TextColumn("{task.description}")
            self.bar = Bar(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), description)
            self.task = self.bar.add_task("", total=self.total)
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def begin(self, what: str) -> None:
        if self.bar is not None:
            self.bar.update(self.task, description=what)

    def end(self, row: Row, seconds: float) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.advance(self.task)
            if row.results[OWN].status in (WRONG, FAILED):
                self.bar.console.print(describe(row), markup=False)
            return
        width = len(str(self.total))
        print(f"[{self.done:{width}}/{self.total}] {describe(row)} ({seconds:.1f} s)", flush=True)


def describe(row: Row) -> str:
    """A row on one line."""
    parts = []
    for name, result in row.results.items():
        us = result.us
        if us is not None:
            figure = f"{microseconds(us)} µs"
            parts.append(f"{name} {figure}" + f" {rate(row.rate(us))} {row.unit}" * (name == OWN))
        elif result.status == OK:
            parts.append(f"{name} right")
        elif result.status in (WRONG, FAILED):
            parts.append(f"{name} {result.status.upper()} {result.note}")
        elif name == OWN:
            parts.append(f"{name} {result.status}: {result.note}")
    return f"{row.case}: " + "; ".join(parts)
