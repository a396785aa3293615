"""Two reports of the same cases: which of our rows changed by more than the noise."""

from __future__ import annotations

from dataclasses import dataclass

from .report import OWN, Report, Row

LEAST_CHANGE = 0.03  # of the time; less is never called a change


@dataclass(frozen=True)
class Change:
    """A row of ours, then and now, in microseconds."""

    case: str
    old_us: float
    new_us: float
    noise: float  # how far apart the two may lie by chance, as a part of the time

    @property
    def ratio(self) -> float:
        """Above 1: slower now."""
        return self.new_us / self.old_us

    @property
    def is_slower(self) -> bool:
        return self.ratio > 1 + self.noise

    @property
    def is_faster(self) -> bool:
        return 1 / self.ratio > 1 + self.noise


@dataclass(frozen=True)
class Comparison:
    """All rows that both have, and remarks on what makes the two hard to compare."""

    changes: list[Change]
    lost: list[str]  # measured then, wrong or failed now
    remarks: list[str]

    @property
    def slower(self) -> list[Change]:
        return sorted((c for c in self.changes if c.is_slower), key=lambda c: -c.ratio)

    @property
    def faster(self) -> list[Change]:
        return sorted((c for c in self.changes if c.is_faster), key=lambda c: c.ratio)


def compare(old: Report, new: Report) -> Comparison:
    changes, lost = [], []
    for row in new.rows:
        before = old.row(row.case)
        if before is None or before.us is None:
            continue
        if row.us is None:
            if OWN in row.results:
                lost.append(row.case)
            continue
        noise = max(LEAST_CHANGE, _noise(before) + _noise(row))
        changes.append(Change(row.case, before.us, row.us, noise))
    return Comparison(changes, lost, _remarks(old, new))


def _noise(row: Row) -> float:
    timing = row.results[OWN].timing
    return timing.noise if timing is not None else 0.0


def _remarks(old: Report, new: Report) -> list[str]:
    remarks = []
    if old.device.get("name") != new.device.get("name"):
        remarks.append(f"another card: {old.device.get('name')} then, {new.device.get('name')} now")
    for name, version in new.versions.items():
        before = old.versions.get(name)
        if before != version and name != "tritonattn":
            remarks.append(f"{name} {before} then, {version} now")
    if old.ceilings is not None and new.ceilings is not None:
        for name, unit in (("read", "TB/s"), ("matmul", "TFLOP/s")):
            then, now = getattr(old.ceilings, name), getattr(new.ceilings, name)
            if abs(now / then - 1) > LEAST_CHANGE:
                remarks.append(f"the card's own {name} {then:.4g} {unit} then, {now:.4g} now")
    return remarks
