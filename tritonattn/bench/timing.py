"""Device and host time of several candidates, interleaved.

The first timing after a pause runs 10 to 20 % fast and a card's clock falls under load, so every
candidate is timed a little in every round, the rounds start with different candidates, and one
round is thrown away.  A candidate is a list of calls, the same on several copies of its inputs;
called in turn they find their inputs out of the L2 cache.

All times are in microseconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any, Protocol

Run = Callable[[], Any]
MOST_CALLS = 512  # in one graph


class Clock(Protocol):
    """What timing asks of a machine."""

    def capture(self, calls: Sequence[Run]) -> Run:
        """Something that replays these calls as one graph; raises what the calls raise."""
        ...

    def device_time(self, run: Run, times: int) -> list[float]:
        """Microseconds on the device of each of ``times`` runs without a pause between them."""
        ...

    def host_time(self, calls: Sequence[Run]) -> tuple[float, float]:
        """Microseconds of the host to issue the calls, and until the device has finished them."""
        ...


@dataclass(frozen=True)
class Effort:
    """How long to measure: microseconds and counts."""

    rounds: int = 5
    round_us: float = 40_000.0  # of one candidate in one round
    sample_us: float = 1_000.0  # a graph is made at least so long, so that its launch is lost in it
    host_loops: int = 5
    host_calls: int = 30  # too few to fill the launch queue
    host_us: float = 30_000.0  # of device work in one host loop, which has fewer calls then


QUICK = Effort(rounds=3, round_us=10_000.0, host_loops=3, host_us=10_000.0)


@dataclass
class Timing:
    """One candidate's times, each of one call, in microseconds."""

    how: str  # "graph": replayed; "events": eager, the host's pauses included
    rounds: list[list[float]] = field(default_factory=list)
    host: list[float] = field(default_factory=list)  # to issue an eager call
    eager: list[float] = field(default_factory=list)  # an eager call in a loop, host and device

    @property
    def median(self) -> float:
        return statistics.median([sample for samples in self.rounds for sample in samples])

    @property
    def noise(self) -> float:
        """Half the range of the rounds' medians, as a part of the median."""
        medians = [statistics.median(samples) for samples in self.rounds]
        return (max(medians) - min(medians)) / 2 / self.median

    @property
    def host_median(self) -> float:
        return statistics.median(self.host)

    @property
    def eager_median(self) -> float:
        return statistics.median(self.eager)


@dataclass
class _Prepared:
    calls: list[Run]  # of one run
    run: Run
    timing: Timing
    run_us: float


def measure(
    candidates: Mapping[str, Sequence[Run]],
    clock: Clock,
    effort: Effort,
    at: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Timing], dict[str, Exception]]:
    """Times by candidate, and what those that failed raised, the first first.

    ``at`` is told whose turn it is.
    """
    prepared: dict[str, _Prepared] = {}
    failed: dict[str, Exception] = {}
    for name, calls in candidates.items():
        at(name)
        try:
            prepared[name] = _prepare(list(calls), clock, effort)
        except Exception as error:
            failed[name] = error
    for number in range(-1, effort.rounds):
        names = list(prepared)
        start = number % len(names) if names else 0
        for name in names[start:] + names[:start]:
            at(name)
            try:
                samples = _sample(prepared[name], clock, effort)
            except Exception as error:
                failed[name] = error
                del prepared[name]
                continue
            if number >= 0:
                prepared[name].timing.rounds.append(samples)
    for _ in range(effort.host_loops):
        for name, one in list(prepared.items()):
            at(name)
            device_us = one.timing.median
            count = max(3, min(effort.host_calls, int(effort.host_us / device_us)))
            try:
                issued, finished = clock.host_time(list(islice(cycle(one.calls), count)))
            except Exception as error:
                failed[name] = error
                del prepared[name]
                continue
            one.timing.host.append(round(issued / count, 3))
            one.timing.eager.append(round(finished / count, 3))
    return {name: one.timing for name, one in prepared.items()}, failed


def _prepare(calls: list[Run], clock: Clock, effort: Effort) -> _Prepared:
    try:
        run, how = clock.capture(calls), "graph"
    except Exception:
        # Some libraries wait for the device or copy from the host: not in a graph.
        run, how = _in_turn(calls), "events"
    run_us = min(clock.device_time(run, 3))
    repeats = min(int(-(-effort.sample_us // max(run_us, 1e-3))), MOST_CALLS // len(calls))
    if repeats > 1:
        calls = calls * repeats
        run = clock.capture(calls) if how == "graph" else _in_turn(calls)
        run_us = min(clock.device_time(run, 2))
    return _Prepared(calls, run, Timing(how), run_us)


def _in_turn(calls: Sequence[Run]) -> Run:
    def run() -> None:
        for call in calls:
            call()

    return run


def _sample(one: _Prepared, clock: Clock, effort: Effort) -> list[float]:
    """Samples of one call's time; a round's first run is dropped where there is time for that."""
    runs = max(1, min(50, int(effort.round_us / one.run_us)))
    extra = 1 if one.run_us < 5 * effort.round_us else 0
    times = clock.device_time(one.run, runs + extra)[extra:]
    return [round(time / len(one.calls), 3) for time in times]
