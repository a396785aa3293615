"""What a task's tuning found, and the choice among what was timed."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from .config import KernelConfig
from .keys import Key
from .source import source_hash
from .tables import Entry

# The default is left for what takes at most so much of its time, and is faster in so many of the
# rounds that both were timed in, and in no situation slower.
SWITCH, MOST_ROUNDS, NOWHERE_OVER = 0.98, 0.75, 1.01

# Of one configuration and round: microseconds a call in each situation.
Sample = tuple[float, ...]


@dataclass
class Outcome:
    """A task's result."""

    key: Key
    best: KernelConfig
    us: float
    default: KernelConfig
    default_us: float  # NaN: the default does not work
    ratio: float = 1.0  # of the default's time, in the median of rounds, over all situations
    runner_up: KernelConfig | None = None
    runner_up_us: float = math.nan
    fastest: KernelConfig | None = None  # by however little
    times: dict[KernelConfig, float] = field(default_factory=dict)
    costs: dict[KernelConfig, float] = field(default_factory=dict)  # the same over all situations
    refused: dict[KernelConfig, str] = field(default_factory=dict)
    is_cut_short: bool = False  # by Ctrl-C or the budget

    @property
    def speedup(self) -> float:
        """Over the default, in all situations."""
        return math.nan if math.isnan(self.default_us) else 1 / self.ratio

    def entry(self) -> Entry:
        import triton

        has_second = self.runner_up is not None
        return Entry(
            None if self.best == self.default else self.best, self.us,
            self.us if math.isnan(self.default_us) else self.default_us,
            self.runner_up, self.runner_up_us if has_second else None,
            datetime.date.today().isoformat(), source_hash(), triton.__version__,
        )  # fmt: skip


def cost(samples: Sequence[Sample]) -> float:
    """Over all situations, of which none counts more for being longer."""
    return statistics.geometric_mean(map(statistics.median, zip(*samples, strict=True)))


@dataclass
class Duel:
    """A configuration against the default, in the rounds that both were timed in."""

    ratio: float  # of the times, in the median of rounds and the mean of situations
    worst: float  # situation's
    won: float  # part of the rounds

    @property
    def is_won(self) -> bool:
        is_surely = self.won >= MOST_ROUNDS and self.worst <= NOWHERE_OVER
        return is_surely and self.ratio <= SWITCH


def duel(mine: Sequence[Sample], default: Sequence[Sample]) -> Duel:
    rounds = [
        [us / other for us, other in zip(*pair, strict=True)]
        for pair in zip(mine, default, strict=False)
    ]
    situations = [statistics.median(ratios) for ratios in zip(*rounds, strict=True)]
    won = sum(statistics.geometric_mean(ratios) < 1 for ratios in rounds) / len(rounds)
    return Duel(statistics.geometric_mean(situations), max(situations), won)


def choose(outcome: Outcome, samples: dict[KernelConfig, list[Sample]]) -> None:
    times, default = outcome.times, outcome.default
    # Where the search was cut short, those that were not dropped, give or take half a turn.
    most = max(map(len, samples.values()))
    finalists = [c for c in times if len(samples[c]) >= most - 1 or c == default]
    ranked = sorted(finalists, key=lambda c: cost(samples[c]))
    outcome.best = outcome.fastest = ranked[0]
    outcome.default_us = times.get(default, math.nan)
    if default in times:
        duels = {c: duel(samples[c], samples[default]) for c in finalists if c != default}
        winners = [c for c, its in duels.items() if its.is_won]
        outcome.best = min(winners, key=lambda c: duels[c].ratio, default=default)
        outcome.ratio = duels[outcome.best].ratio if winners else 1.0
    outcome.us = times[outcome.best]
    others = [config for config in ranked if config != outcome.best]
    if others:
        outcome.runner_up, outcome.runner_up_us = others[0], times[others[0]]
