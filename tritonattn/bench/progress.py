"""How far a run is: a bar on a terminal, a line a case elsewhere."""

from __future__ import annotations

from ..console import Bar, has_rich_terminal
from .report import FAILED, OK, OWN, WRONG, Row
from .tables import Table, microseconds, rate


def show(table: Table) -> None:
    lines = table.lines()
    if has_rich_terminal():
        from rich.console import Console

        console = Console()
        if console.width >= max(map(len, lines)):
            console.print(table.rich())
            return
    print("\n".join(lines), flush=True)


class Progress(Bar):
    """Prints as cases end; on a terminal only those that are wrong, beside the bar."""

    done = 0

    def begin(self, what: str) -> None:
        self.at(self.done, what)

    def end(self, row: Row, seconds: float) -> None:
        self.done += 1
        self.at(self.done, row.case)
        width = len(str(self.total))
        if not self.is_drawn:
            self.line(f"[{self.done:{width}}/{self.total}] {describe(row)} ({seconds:.1f} s)")
        elif row.results[OWN].status in (WRONG, FAILED):
            self.line(describe(row))


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
