"""Choosing a configuration by measuring: compile, prune, check, time, choose.

Nothing here touches a GPU: a Backend compiles, and runs what is to be checked and timed.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..device import Device
from ..errors import TritonAttnError
from . import space
from .compile import Report
from .config import KernelConfig
from .keys import Key
from .source import source_hash
from .tables import Entry
from .tasks import Task

SWITCH = 0.97  # of the default's time: what takes longer is not worth leaving it for
TENSOR_MEMORY = 512  # columns


class Round(NamedTuple):
    samples: int  # of each configuration
    slack: float  # how much slower than the best may stay
    most: int  # how many stay


ROUNDS = (Round(3, 1.25, 12), Round(5, 1.10, 6), Round(9, 1.05, 4), Round(9, 1.0, 4))


class TuningError(TritonAttnError, RuntimeError):
    """No configuration of a task works."""


class GpuLostError(TritonAttnError, RuntimeError):
    """A kernel failed in a way after which this process cannot use the GPU."""


class Session(Protocol):
    """One task's tensors, which every configuration is checked and timed with."""

    def check(self, config: KernelConfig) -> str:
        """What is wrong with the results, "" if nothing is."""

    def time(self, config: KernelConfig) -> float:
        """One sample: microseconds a call."""


class Backend(Protocol):
    def compile(
        self, task: Task, configs: Sequence[KernelConfig]
    ) -> Generator[tuple[KernelConfig, Report | str], None, None]:
        """Each with what it takes, or why it does not compile, as they finish."""

    def session(self, task: Task) -> contextlib.AbstractContextManager[Session]: ...


@dataclass
class Progress:
    """What a bar shows; ``show`` is called at every step."""

    show: Callable[[Progress], None] = lambda _: None
    task: Task | None = None
    step: str = ""
    done: int = 0
    total: int = 0
    configs: int = 0  # finished in all, whatever became of them
    best: str = ""

    def at(self, step: str, done: int, total: int) -> None:
        self.step, self.done, self.total = step, done, total
        self.show(self)


@dataclass
class Outcome:
    """A task's result."""

    key: Key
    best: KernelConfig
    us: float
    default: KernelConfig
    default_us: float  # NaN: the default does not work
    runner_up: KernelConfig | None = None
    runner_up_us: float = math.nan
    fastest: KernelConfig | None = None  # by however little
    times: dict[KernelConfig, float] = field(default_factory=dict)
    refused: dict[KernelConfig, str] = field(default_factory=dict)
    is_cut_short: bool = False  # by Ctrl-C or the budget

    @property
    def speedup(self) -> float:
        return self.default_us / self.us

    def entry(self) -> Entry:
        import triton

        has_second = self.runner_up is not None
        return Entry(
            self.best, self.us, self.us if math.isnan(self.default_us) else self.default_us,
            self.runner_up, self.runner_up_us if has_second else None,
            datetime.date.today().isoformat(), source_hash(), triton.__version__,
        )  # fmt: skip


def tune(
    task: Task,
    device: Device,
    backend: Backend,
    *,
    prior: Iterable[KernelConfig] = (),
    deadline: float = math.inf,
    exhaustive: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """The best configuration for ``task``, the heuristic's own unless another is 3 % faster.

    ``prior`` are more to try; ``deadline`` is on ``time.monotonic``'s clock.  ``exhaustive`` drops
    none of the slow ones before the end.  Ctrl-C and the deadline end the search with the best so
    far; Ctrl-C before there is one is raised.  Raises TuningError where nothing works.
    """
    progress = progress or Progress()
    progress.task, progress.best = task, ""
    problem = task.problem
    configs = space.candidates(problem, device)
    default = configs[0]
    fitted = (space.fit(config, problem, device) for config in prior)
    configs = list(dict.fromkeys([*configs, *filter(None, fitted)]))
    outcome = Outcome(task.key, default, math.nan, default, math.nan)
    samples: dict[KernelConfig, list[float]] = {}
    try:
        alive = _compiled(task, device, backend, configs, outcome.refused, progress)
        with backend.session(task) as session:
            alive = _right(session, alive, outcome.refused, progress)
            samples.update({config: [] for config in alive})
            outcome.is_cut_short = not _time(
                session, samples, default, outcome.refused, deadline, exhaustive, progress
            )
    except KeyboardInterrupt:
        outcome.is_cut_short = True
        if not any(samples.values()):
            raise
    outcome.times = {c: statistics.median(s) for c, s in samples.items() if s}
    if not outcome.times:
        raise TuningError(f"{task}: {_why_none(outcome.refused)}")
    _choose(outcome, samples)
    return outcome


def _compiled(
    task: Task,
    device: Device,
    backend: Backend,
    configs: list[KernelConfig],
    refused: dict[KernelConfig, str],
    progress: Progress,
) -> list[KernelConfig]:
    """Those that compile, fit and do not spill in their loops."""
    reports: dict[KernelConfig, Report] = {}
    progress.at("compile", 0, len(configs))
    # Closed whatever happens, and with it the processes behind it.
    with contextlib.closing(backend.compile(task, configs)) as results:
        for config, report in results:
            if isinstance(report, str):
                refused[config] = f"does not compile: {report}"
            elif report.shared > device.shared_memory:
                refused[config] = f"needs {report.shared} bytes of shared memory"
            elif report.tensor_memory > TENSOR_MEMORY:
                refused[config] = f"needs {report.tensor_memory} columns of tensor memory"
            else:
                reports[config] = report
            progress.configs += config in refused
            progress.at("compile", progress.done + 1, len(configs))
    spills = {config: report.spills_in_loops for config, report in reports.items()}
    for config, count in spills.items():
        # Above 0 where everything spills.
        least = min(n for other, n in spills.items() if other.kernel == config.kernel)
        if count > least and config != configs[0]:
            refused[config] = f"spills: {count} instructions in its loops"
            progress.configs += 1
    return [config for config in configs if config in reports and config not in refused]


def _right(
    session: Session,
    configs: list[KernelConfig],
    refused: dict[KernelConfig, str],
    progress: Progress,
) -> list[KernelConfig]:
    right = []
    for i, config in enumerate(configs):
        progress.at("check", i, len(configs))
        try:
            wrong = session.check(config)
        except GpuLostError:
            raise
        except Exception as error:  # a launch may fail in any way; others may still work
            wrong = one_line(error)
        if wrong:
            refused[config] = f"wrong: {wrong}"
            progress.configs += 1
        else:
            right.append(config)
    return right


def _time(
    session: Session,
    samples: dict[KernelConfig, list[float]],
    default: KernelConfig,
    refused: dict[KernelConfig, str],
    deadline: float,
    exhaustive: bool,
    progress: Progress,
) -> bool:
    """Fill ``samples``, all configurations in turn so that drifts meet all; whether it finished."""
    alive = list(samples)
    for number, (count, slack, most) in enumerate(ROUNDS):
        for i in range(count):
            turn = i % max(1, len(alive))
            for config in alive[turn:] + alive[:turn]:
                if time.monotonic() > deadline and (number or i):  # once round, to have something
                    return False
                try:
                    samples[config].append(session.time(config))
                except GpuLostError:
                    raise
                except Exception as error:
                    refused[config] = f"failed while timed: {one_line(error)}"
                    del samples[config]
            alive = [config for config in alive if config in samples]
            if alive:
                first = min(alive, key=lambda c: statistics.median(samples[c]))
                us = statistics.median(samples[first])
                progress.best = f"{us:.1f} µs"
            progress.at(f"time, round {number + 1}", i + 1, count)
        ranked = sorted(alive, key=lambda c: statistics.median(samples[c]))
        kept = ranked
        if ranked and not exhaustive:
            limit = slack * statistics.median(samples[ranked[0]])
            kept = [c for c in ranked if statistics.median(samples[c]) <= limit][:most]
            # Two at least, and the default, which the choice is measured against.
            kept = [c for c in ranked if c in kept or c == default or c in ranked[:2]]
        progress.configs += len(alive) - len(kept) if number + 1 < len(ROUNDS) else len(alive)
        alive = kept
    return True


def _choose(outcome: Outcome, samples: dict[KernelConfig, list[float]]) -> None:
    """Among those sampled most, since the others lost before; the default is always among them."""
    most = max(map(len, samples.values()))
    times = outcome.times
    finalists = [c for c in times if len(samples[c]) == most or c == outcome.default]
    if outcome.is_cut_short:  # in the middle of a round some have one sample less
        finalists = [c for c in times if len(samples[c]) >= most - 1 or c == outcome.default]
    ranked = sorted(finalists, key=times.__getitem__)
    outcome.fastest = ranked[0]
    outcome.default_us = times.get(outcome.default, math.nan)
    is_worth_it = not times[ranked[0]] > SWITCH * outcome.default_us
    outcome.best = ranked[0] if is_worth_it else outcome.default
    outcome.us = times[outcome.best]
    others = [config for config in ranked if config != outcome.best]
    if others:
        outcome.runner_up, outcome.runner_up_us = others[0], times[others[0]]


def _why_none(refused: dict[KernelConfig, str]) -> str:
    kinds = Counter(reason.split(":")[0] for reason in refused.values())
    examples = {reason.split(":")[0]: reason for reason in reversed(refused.values())}
    counts = "; ".join(f"{count} x {examples[kind]}" for kind, count in kinds.most_common())
    return f"none of {len(refused)} configurations works: {counts}. The table is left as it was."


def one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
