"""Choosing a configuration by measuring: compile, prune, check, time, choose.

Nothing here touches a GPU: a Backend compiles, and runs what is to be checked and timed.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..device import Device
from ..errors import TritonAttnError
from ..plan import kinds
from . import space
from .compile import Report
from .config import KernelConfig
from .outcome import NOWHERE_OVER, Outcome, Sample, choose, cost, duel
from .tasks import Task

TENSOR_MEMORY = 512  # columns


class Round(NamedTuple):
    samples: int  # of each configuration
    replays: int  # in one sample
    slack: float  # how much slower than the best may stay
    most: int  # how many stay


ROUNDS = (Round(2, 1, 1.25, 10), Round(3, 2, 1.10, 5), Round(4, 3, 1.05, 3), Round(12, 5, 1.0, 3))


class TuningError(TritonAttnError, RuntimeError):
    """No configuration of a task works."""


class GpuLostError(TritonAttnError, RuntimeError):
    """A kernel failed in a way after which this process cannot use the GPU."""


class Session(Protocol):
    """One task's tensors, which every configuration is checked and timed with."""

    def check(self, config: KernelConfig) -> str:
        """What is wrong with the results, "" if nothing is."""

    def time(self, config: KernelConfig, replays: int = 1) -> Sample:
        """The median of so many replays, in each of the task's situations, its own first."""


class Backend(Protocol):
    def foresee(self, task: Task, configs: Sequence[KernelConfig]) -> None:
        """``compile`` will be asked for these, after those foreseen before."""

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
    spent: dict[str, float] = field(default_factory=dict)  # seconds, by the step's first word
    _since: float = field(default_factory=time.monotonic)

    def at(self, step: str, done: int, total: int) -> None:
        now = time.monotonic()
        last = (self.step or step).split(",")[0]
        self.spent[last] = self.spent.get(last, 0.0) + now - self._since
        self._since = now
        self.step, self.done, self.total = step, done, total
        self.show(self)


def tune(
    task: Task,
    device: Device,
    backend: Backend,
    *,
    prior: Iterable[KernelConfig] = (),
    deadline: float = math.inf,
    exhaustive: bool = False,
    keep: KernelConfig | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """The best configuration for ``task``, the heuristic's own unless another is clearly faster.

    ``prior`` are more to try; ``deadline`` is on ``time.monotonic``'s clock.  ``exhaustive`` tries
    what is unlikely to win too.  ``keep`` is timed to the end, as the default is.  Ctrl-C and the
    deadline end the search with the best so far; Ctrl-C before there is one is raised.  Raises
    TuningError where nothing works.
    """
    if len(kinds(task.problem, device)) > 1:
        raise TuningError(
            f"{task}: short and long sequences of one call are launched apart, each with the "
            "configuration of its own bucket: tune these"
        )
    progress = progress or Progress()
    progress.task, progress.best = task, ""
    configs = tried(task, device, [*prior, *filter(None, [keep])], exhaustive)
    default = configs[0]
    outcome = Outcome(task.key, default, math.nan, default, math.nan)
    samples: dict[KernelConfig, list[Sample]] = {}
    try:
        alive = _compiled(task, device, backend, configs, outcome.refused, progress)
        progress.at("prepare", 0, 1)
        with backend.session(task) as session:
            alive = _right(session, alive, outcome.refused, progress)
            samples.update({config: [] for config in alive})
            outcome.is_cut_short = not _time(
                session, samples, default, keep, outcome.refused, deadline, progress
            )
    except KeyboardInterrupt:
        outcome.is_cut_short = True
        if not any(samples.values()):
            raise
    samples = {config: mine for config, mine in samples.items() if mine}
    outcome.times = {c: statistics.median(us for us, *_ in s) for c, s in samples.items()}
    outcome.costs = {c: cost(s) for c, s in samples.items()}
    if not outcome.times:
        raise TuningError(f"{task}: {_why_none(outcome.refused)}")
    choose(outcome, samples)
    return outcome


def tried(
    task: Task, device: Device, prior: Iterable[KernelConfig] = (), exhaustive: bool = False
) -> list[KernelConfig]:
    """What ``tune`` times, the heuristic's own choice first."""
    problem = task.problem
    fitted = (space.fit(config, problem, device) for config in prior)
    found = space.candidates(problem, device, exhaustive)
    return list(dict.fromkeys([*found, *filter(None, fitted)]))


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
    samples: dict[KernelConfig, list[Sample]],
    default: KernelConfig,
    keep: KernelConfig | None,
    refused: dict[KernelConfig, str],
    deadline: float,
    progress: Progress,
) -> bool:
    """Fill ``samples``, all configurations in turn so that drifts meet all; whether it finished.

    Then those that stayed to the end have the samples of the last round alone, the others none.
    """
    alive = list(samples)
    for number, (count, replays, slack, most) in enumerate(ROUNDS):
        for i in range(count):
            # Forwards and backwards: nobody always comes behind the same one.
            turn = i // 2 % max(1, len(alive))
            order = (alive[turn:] + alive[:turn])[:: -1 if i % 2 else 1]
            for place, config in enumerate(order):
                if not (number or i):
                    progress.at("record", place, len(order))  # its graphs, beside the first sample
                if time.monotonic() > deadline and (number or i):  # once round, to have something
                    return False
                try:
                    samples[config].append(session.time(config, replays))
                except GpuLostError:
                    raise
                except Exception as error:
                    refused[config] = f"failed while timed: {one_line(error)}"
                    del samples[config]
            alive = [config for config in alive if config in samples]
            if alive:
                progress.best = f"{min(cost(samples[config]) for config in alive):.1f} µs"
            progress.at(f"time, round {number + 1}", i + 1, count)
        if number + 1 == len(ROUNDS):
            progress.configs += len(alive)
            for config, mine in samples.items():
                samples[config] = mine[-count:] if config in alive else []
            break
        # First those that may win.
        duels = {c: duel(samples[c], samples.get(default, samples[c])) for c in alive}
        ranked = sorted(alive, key=lambda c: (duels[c].worst > NOWHERE_OVER, cost(samples[c])))
        limit = slack * cost(samples[ranked[0]]) if ranked else 0.0
        kept = [c for c in ranked if cost(samples[c]) <= limit][:most]
        # Two at least.
        kept = [c for c in ranked if c in kept or c in (default, keep) or c in ranked[:2]]
        progress.configs += len(alive) - len(kept)
        alive = kept
    return True


def _why_none(refused: dict[KernelConfig, str]) -> str:
    kinds = Counter(reason.split(":")[0] for reason in refused.values())
    examples = {reason.split(":")[0]: reason for reason in reversed(refused.values())}
    counts = "; ".join(f"{count} x {examples[kind]}" for kind, count in kinds.most_common())
    return f"none of {len(refused)} configurations works: {counts}. The table is left as it was."


def one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
