"""Output: a bar on a terminal where rich is installed, plain lines everywhere else."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, TypeVar

AnyBar = TypeVar("AnyBar", bound="Bar")


def has_rich_terminal() -> bool:
    """Whether to draw: a terminal, and rich is installed."""
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


class Bar:
    """``done`` of ``total``, with words beside it; a context manager.

    Without a terminal the words are not shown: what is worth a line goes through ``line``.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self: AnyBar) -> AnyBar:
        if has_rich_terminal():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
            from rich.progress import TimeElapsedColumn as Elapsed

            words = TextColumn("{task.description}", markup=False)
            self._bar = Progress(BarColumn(20), MofNCompleteColumn(), Elapsed(), words)
            self._task = self._bar.add_task("", total=self.total)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def is_drawn(self) -> bool:
        return self._bar is not None

    def at(self, done: float, words: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=words)

    def line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)


def columns(rows: Iterable[Sequence[object]], indent: str = "") -> str:
    """Rows of cells as lines, columns aligned: numbers to the right, words to the left."""
    table = [[str(cell) for cell in row] for row in rows]
    if not table:
        return ""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    right = [
        all(_is_number(cell) for cell in column[1:]) and len(column) > 1
        for column in zip(*table, strict=True)
    ]
    lines = []
    for row in table:
        cells = [
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, right, strict=True)
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def count(number: int, what: str) -> str:
    """``1 bucket``, ``2 buckets``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _is_number(text: str) -> bool:
    return text.rstrip("%x").replace(".", "", 1).lstrip("+-").isdigit() or text in ("", "-")
