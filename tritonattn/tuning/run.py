"""Many tasks: tuning them within a budget, and comparing what tables say with the heuristic."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..device import Device
from . import store
from .config import KernelConfig
from .heuristics import heuristic
from .outcome import Outcome, Sample, cost
from .search import Backend, GpuLostError, Progress, one_line, tried, tune
from .store import Found
from .tasks import Task

AHEAD = 24  # tasks whose candidates compile while one is timed: many share theirs
REPLAYS = 3  # in a sample of a comparison


@dataclass
class Run:
    outcomes: list[tuple[Task, Outcome]] = field(default_factory=list)
    failures: list[tuple[Task, str]] = field(default_factory=list)
    left: list[Task] = field(default_factory=list)  # the budget did not reach them
    is_interrupted: bool = False
    lost: str = ""  # why the GPU could not be used further


def tune_all(
    tasks: Sequence[Task],
    device: Device,
    backend: Backend,
    save: Callable[[Task, Outcome], None],
    *,
    budget: float = math.inf,
    exhaustive: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Tune each; ``save`` is called after each, so that whatever ends the run costs one task.

    ``budget`` is in seconds.  A task that fails is listed and the others go on.
    """
    run = Run()
    deadline = time.monotonic() + budget
    for i, task in enumerate(tasks):
        if time.monotonic() > deadline:
            run.left = list(tasks[i:])
            break
        _foresee(tasks, i, device, backend, exhaustive)
        prior = _known(task, device)
        try:
            outcome = tune(
                task, device, backend, prior=prior, deadline=deadline, exhaustive=exhaustive,
                progress=progress,
            )  # fmt: skip
            save(task, outcome)
        except KeyboardInterrupt:
            run.is_interrupted, run.left = True, list(tasks[i:])
            break
        except GpuLostError as error:
            run.lost, run.left = str(error), list(tasks[i:])
            break
        except Exception as error:  # out of memory, say: the next may be smaller
            run.failures.append((task, one_line(error)))
            continue
        run.outcomes.append((task, outcome))
        if outcome.is_cut_short and time.monotonic() <= deadline:
            run.is_interrupted, run.left = True, list(tasks[i + 1 :])
            break
    return run


def _foresee(
    tasks: Sequence[Task], i: int, device: Device, backend: Backend, exhaustive: bool
) -> None:
    """At the ``i``th task: what comes within AHEAD of it and was not foreseen before."""
    for task in tasks[0 if i == 0 else i + AHEAD : i + AHEAD + 1]:
        # Of one that cannot run on this GPU it is said when its turn comes.
        with contextlib.suppress(Exception):
            backend.foresee(task, tried(task, device, _known(task, device), exhaustive))


def _known(task: Task, device: Device) -> list[KernelConfig]:
    entry = store.tuned(task.key, device)
    return [entry.config] if entry is not None and entry.config is not None else []


@dataclass
class Comparison:
    """What ``store`` chooses for a task against the heuristic; times in microseconds a call."""

    task: Task
    found: Found
    us: float
    heuristic: KernelConfig
    heuristic_us: float
    ratio: float  # the heuristic's time over the store's, over all situations
    regret: float = math.nan  # how much longer than the best of all, where they were timed


@dataclass
class Comparisons:
    found: list[Comparison] = field(default_factory=list)
    failures: list[tuple[Task, str]] = field(default_factory=list)
    left: list[Task] = field(default_factory=list)  # the budget did not reach them
    is_interrupted: bool = False
    lost: str = ""  # why the GPU could not be used further


def compare_all(
    tasks: Sequence[Task],
    device: Device,
    backend: Backend,
    show: Callable[[Comparison], None] = lambda _: None,
    *,
    budget: float = math.inf,
    exhaustive: bool = False,
    samples: int = 25,
    progress: Progress | None = None,
) -> Comparisons:
    """``exhaustive`` times every candidate too; ``show`` is called after each task."""
    result = Comparisons()
    deadline = time.monotonic() + budget
    for i, task in enumerate(tasks):
        if time.monotonic() > deadline:
            result.left = list(tasks[i:])
            break
        if exhaustive:
            _foresee(tasks, i, device, backend, exhaustive)
        try:
            comparison = _compare(task, device, backend, deadline, exhaustive, samples, progress)
        except KeyboardInterrupt:
            result.is_interrupted, result.left = True, list(tasks[i:])
            break
        except GpuLostError as error:
            result.lost, result.left = str(error), list(tasks[i:])
            break
        except Exception as error:
            result.failures.append((task, one_line(error)))
            continue
        if comparison is None:
            result.failures.append((task, "the table's and the heuristic's were not both timed"))
            continue
        result.found.append(comparison)
        show(comparison)
    return result


def _compare(
    task: Task,
    device: Device,
    backend: Backend,
    deadline: float,
    exhaustive: bool,
    samples: int,
    progress: Progress | None,
) -> Comparison | None:
    """None where the budget ended before both were timed, or one of them does not work."""
    found = store.find(task.problem, device)
    default = heuristic(task.problem, device)
    if exhaustive:
        outcome = tune(
            task, device, backend, keep=found.config, deadline=deadline, exhaustive=True,
            progress=progress,
        )  # fmt: skip
        times, costs = outcome.times, outcome.costs
    else:
        pair = list(dict.fromkeys([found.config, default]))
        taken = _time(task, pair, backend, samples, progress)
        times = {c: statistics.median(us for us, *_ in mine) for c, mine in taken.items()}
        costs = {config: cost(mine) for config, mine in taken.items()}
    if not {found.config, default} <= set(costs):
        return None
    ratio = costs[default] / costs[found.config]
    comparison = Comparison(task, found, times[found.config], default, times[default], ratio)
    if exhaustive:
        comparison.regret = costs[found.config] / min(costs.values()) - 1
    return comparison


def _time(
    task: Task,
    configs: list[KernelConfig],
    backend: Backend,
    samples: int,
    progress: Progress | None,
) -> dict[KernelConfig, list[Sample]]:
    taken: dict[KernelConfig, list[Sample]] = {config: [] for config in configs}
    with backend.session(task) as session:
        for i in range(samples):
            for config in configs[i % len(configs) :] + configs[: i % len(configs)]:
                taken[config].append(session.time(config, REPLAYS))
            if progress is not None:
                progress.task = task
                progress.at("time", i + 1, samples)
    return taken
