"""Many tasks: tuning them within a budget, and comparing what tables say with the heuristic."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ..device import Device
from . import store
from .config import KernelConfig
from .heuristics import heuristic
from .search import Backend, GpuLostError, Outcome, Progress, one_line, tune
from .store import Found
from .tasks import Task


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
        known = store.tuned(task.key, device)
        prior = [] if known is None else [known.config]
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


@dataclass
class Comparison:
    """What ``store`` chooses for a task against the heuristic; times in microseconds a call."""

    task: Task
    found: Found
    us: float
    heuristic: KernelConfig
    heuristic_us: float
    best_us: float = math.nan  # of all candidates, where they were timed


def compare_all(
    tasks: Iterable[Task],
    device: Device,
    backend: Backend,
    show: Callable[[Comparison], None] = lambda _: None,
    *,
    budget: float = math.inf,
    exhaustive: bool = False,
    samples: int = 25,
    progress: Progress | None = None,
) -> list[Comparison]:
    """``exhaustive`` times every candidate too; ``show`` is called after each task."""
    deadline = time.monotonic() + budget
    comparisons: list[Comparison] = []
    for task in tasks:
        if time.monotonic() > deadline:
            break
        found = store.find(task.problem, device)
        default = heuristic(task.problem, device)
        if exhaustive:
            outcome = tune(
                task, device, backend, prior=[found.config], deadline=deadline, exhaustive=True,
                progress=progress,
            )  # fmt: skip
            times = outcome.times
        else:
            pair = list(dict.fromkeys([found.config, default]))
            times = _time(task, pair, backend, samples, progress)
        comparison = Comparison(task, found, times[found.config], default, times[default])
        if exhaustive:
            comparison.best_us = min(times.values())
        comparisons.append(comparison)
        show(comparison)
    return comparisons


def _time(
    task: Task,
    configs: list[KernelConfig],
    backend: Backend,
    samples: int,
    progress: Progress | None,
) -> dict[KernelConfig, float]:
    taken: dict[KernelConfig, list[float]] = {config: [] for config in configs}
    with backend.session(task) as session:
        for i in range(samples):
            for config in configs[i % len(configs) :] + configs[: i % len(configs)]:
                taken[config].append(session.time(config))
            if progress is not None:
                progress.task = task
                progress.at("time", i + 1, samples)
    return {config: statistics.median(times) for config, times in taken.items()}
