"""One run: every case built, checked, measured and forgotten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from ..call import Call
from .cases import Case
from .correctness import Oracle, Wrong
from .gpu import LostError, ensure_alive
from .inputs import build, copies, own
from .peers import Unsupported, one_line
from .report import FAILED, OK, OWN, SKIPPED, WRONG, Result, Row
from .timing import Clock, Effort, Run, measure

Prepare = Callable[[Case, Sequence[Call]], list[Run]]


def run_case(
    case: Case,
    device: torch.device,
    peers: Mapping[str, ModuleType],
    l2_bytes: int,
    clock: Clock | None,
    effort: Effort,
    at: Callable[[str], None] = lambda _: None,
) -> Row:
    """Check this package and its peers on a case, and time those that are right.

    ``clock=None``: check only.  ``at`` is told whose turn it is.  Raises LostError, which names who
    has broken the GPU's context.
    """
    row = Row.of(case)
    try:
        with torch.no_grad():
            _run(case, device, peers, l2_bytes if clock else 0, clock, effort, at, row)
    except torch.OutOfMemoryError:
        row.results = {OWN: Result(SKIPPED, "does not fit in this card's memory")}
    return row


def _run(
    case: Case,
    device: torch.device,
    peers: Mapping[str, ModuleType],
    l2_bytes: int,
    clock: Clock | None,
    effort: Effort,
    at: Callable[[str], None],
    row: Row,
) -> None:
    call = build(case, device)
    calls = copies(case, call, l2_bytes)
    oracle = Oracle(case, call)
    ready: dict[str, list[Run]] = {}
    everybody: dict[str, Prepare] = {OWN: _prepare_own}
    everybody |= {name: module.prepare for name, module in peers.items()}
    for name, prepare in everybody.items():
        at(name)
        try:
            runs = prepare(case, calls)
            result = _poisoned(call) if name == OWN else runs[0]()
            oracle.check(result, is_peer=name != OWN)
            row.results[name] = Result(OK)
            ready[name] = runs
        except Unsupported as error:
            row.results[name] = Result(SKIPPED, one_line(error))
        except Wrong as error:
            row.results[name] = Result(WRONG, str(error)[:400])
        except Exception as error:
            row.results[name] = Result(FAILED, one_line(error))
            _survive(device, name, error)
    if clock is None:
        return
    timings, failed = measure(ready, clock, effort, at)
    for name, timing in timings.items():
        row.results[name].timing = timing
    for name, raised in failed.items():
        row.results[name] = Result(FAILED, one_line(raised))
        _survive(device, name, raised)  # the first: after it, all others would fail too


def _survive(device: torch.device, name: str, error: Exception) -> None:
    """Raise LostError if what ``name`` raised was the end of the GPU's context."""
    try:
        ensure_alive(device)
    except LostError as lost:
        raise LostError(f"{one_line(error)} ({lost})", name) from error


def _prepare_own(case: Case, calls: Sequence[Call]) -> list[Run]:
    return [own(call) for call in calls]


def _poisoned(call: Call) -> Any:
    """This package's result, in memory that was full of NaN."""
    shape = (*call.q.shape[:2], _value_dim(call))
    return own(call, call.q.new_full(shape, torch.nan))()


def _value_dim(call: Call) -> int:
    values = call.v_cache if call.v is None else call.v
    assert values is not None
    return values.shape[-1]
