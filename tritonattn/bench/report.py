"""The figures of one run: kept, written as JSON, read again.

A result's times are in microseconds, one list a round; ceilings in TB/s and TFLOP/s.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .cases import RATES, Case
from .roofline import Ceilings
from .timing import Timing

KIND, SCHEMA = "tritonattn bench", 1
OWN = "tritonattn"
REPLACED = "replaced"  # of a report's settings: why the GPU's processes were, one after the other
OK, WRONG, FAILED, SKIPPED = "ok", "wrong", "failed", "skipped"


@dataclass
class Result:
    """One candidate on one case."""

    status: str  # OK, WRONG (not timed), FAILED (raised), SKIPPED (cannot, or not timed)
    note: str = ""  # why not OK
    timing: Timing | None = None

    @property
    def us(self) -> float | None:
        """Median microseconds of a call on the device."""
        if self.status != OK or self.timing is None or not self.timing.rounds:
            return None
        return self.timing.median


@dataclass
class Row:
    """One case with everybody's results."""

    case: str
    group: str
    unit: str
    flops: int
    bytes: int
    plain: str = ""
    results: dict[str, Result] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case) -> Row:
        return cls(case.name, case.group, case.unit, case.flops, case.bytes, case.plain)

    @property
    def title(self) -> str:
        return self.case.removeprefix(f"{self.group} ")

    @property
    def us(self) -> float | None:
        return self.us_of(OWN)

    def us_of(self, name: str) -> float | None:
        result = self.results.get(name)
        return None if result is None else result.us

    def rate(self, us: float) -> float:
        """In ``unit``."""
        return (self.flops if self.unit == "TFLOP/s" else self.bytes) / us / RATES[self.unit]

    @property
    def best_peer(self) -> tuple[str, float] | None:
        """The fastest right peer and its microseconds."""
        times = {name: us for name in self.results if name != OWN and (us := self.us_of(name))}
        best = min(times, key=lambda name: times[name], default=None)
        return None if best is None else (best, times[best])

    @property
    def ratio(self) -> float | None:
        """The best peer's time over ours: above 1, we are faster."""
        us, best = self.us, self.best_peer
        return best[1] / us if us and best else None

    def part_of_ceiling(self, ceilings: Ceilings | None) -> float | None:
        """What the card's limits would take over what we take, at most about 1."""
        us = self.us
        if ceilings is None or not us:
            return None
        return ceilings.floor_us(self.bytes, self.flops) / us


@dataclass
class Report:
    date: str  # ISO 8601, UTC
    device: dict[str, Any]
    versions: dict[str, Any]
    settings: dict[str, Any]
    peers: dict[str, str]  # version, or why it is not there
    ceilings: Ceilings | None = None  # before the first case
    ceilings_after: Ceilings | None = None  # after the last
    rows: list[Row] = field(default_factory=list)

    def row(self, case: str) -> Row | None:
        return next((row for row in self.rows if row.case == case), None)

    def to_json(self) -> str:
        text = json.dumps({"kind": KIND, "schema": SCHEMA, **asdict(self)}, indent=1)
        # Lists of numbers on one line each.
        return re.sub(r"\[[-+\d.e,\s]+\]", lambda found: " ".join(found[0].split()), text) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """ValueError for anything that is not a report of this schema."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON ({error})") from error
        if not isinstance(data, dict) or data.get("kind") != KIND:
            raise ValueError(f"not written by {KIND!r}")
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema')!r}, and this version reads {SCHEMA}")
        try:
            return cls(
                **_known(data, cls, "ceilings", "ceilings_after", "rows"),
                ceilings=_ceilings(data["ceilings"]),
                ceilings_after=_ceilings(data["ceilings_after"]),
                rows=[_row(row) for row in data["rows"]],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"damaged: {type(error).__name__} {error}") from error

    def save(self, path: Path) -> None:
        """Replace the file at once, so that a stopped run leaves the last whole one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(self.to_json(), encoding="utf-8")
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Report:
        """ValueError, naming the file, for one that cannot be read."""
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _known(data: dict[str, Any], cls: Any, *without: str) -> dict[str, Any]:
    return {f.name: data[f.name] for f in fields(cls) if f.name not in without}


def _ceilings(data: dict[str, float] | None) -> Ceilings | None:
    return None if data is None else Ceilings(**_known(data, Ceilings))


def _row(data: dict[str, Any]) -> Row:
    results = {}
    for name, result in data["results"].items():
        timing = result["timing"]
        timing = None if timing is None else Timing(**_known(timing, Timing))
        results[name] = Result(**_known(result, Result, "timing"), timing=timing)
    return Row(**_known(data, Row, "results"), results=results)
