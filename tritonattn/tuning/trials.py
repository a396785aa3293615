"""The real Backend: compiles in processes, checks against the oracle, times on the GPU.

A time is the median of replays, one behind the other and behind one that does not count, of a CUDA
graph of many calls.  They go round copies of the inputs that exceed the GPU's L2 cache together, so
that every call finds its keys in memory as a serving loop does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from .. import api, reference
from .. import device as devices
from ..call import Call
from ..case import Case
from ..device import Device
from ..plan import Plan, plan
from ..testing import Budget, error_factor
from ..validate import validate
from .build import CallTensors, build, named, small_case, with_lengths
from .compile import Report
from .config import KernelConfig
from .graphs import capture
from .heuristics import heuristic
from .keys import key_of
from .search import GpuLostError, Session, one_line
from .store import force
from .tasks import Task
from .workers import Compilers, Job

GRAPH_US = 400.0  # the least that a sample lasts: events tick in half microseconds
MOST_COPIES = 64
MOST_US = 4000.0  # that more than one replay is to last
MOST_CALLS = 512  # in one graph
TURNS = 8  # calls of mixed lengths at least, each long elsewhere

# Small cases, as text, and the configurations that gave the right results: buckets share binaries,
# and the same binary on the same inputs gives the same bits.
Right = set[tuple[str, KernelConfig]]
# Of something to run with a number, and how many numbers there are: microseconds a run in the
# median of so many replays, or fewer where they take long.
Sampler = Callable[[int], float]
Timer = Callable[[Callable[[int], None], int], Sampler]


class GpuBackend:
    """Runs on ``where``; ``processes`` compile, by default all cores but one."""

    def __init__(self, where: torch.device, processes: int | None = None) -> None:
        self.where = where
        self.device = devices.describe(where)
        self._compilers = Compilers(processes)
        self._reports: dict[Job, Report | str] = {}
        self._right: Right = set()

    def foresee(self, task: Task, configs: Sequence[KernelConfig]) -> None:
        jobs = [job_of(task, config, self.device) for config in configs]
        self._compilers.foresee([job for job in jobs if job not in self._reports])

    def compile(
        self, task: Task, configs: Sequence[KernelConfig]
    ) -> Generator[tuple[KernelConfig, Report | str], None, None]:
        jobs = {config: job_of(task, config, self.device) for config in configs}
        for config, job in jobs.items():
            if job in self._reports:
                yield config, self._reports[job]
        new = {job: config for config, job in jobs.items() if job not in self._reports}
        # Closed with this generator, and what is not compiled by then is given up.
        with contextlib.closing(self._compilers.compile(list(new))) as results:
            for job, report in results:
                self._reports[job] = report
                yield new[job], report

    def close(self) -> None:
        self._compilers.close()

    @contextlib.contextmanager
    def session(self, task: Task) -> Iterator[Session]:
        trials = Trials(task, self.where, graph_timer(self.where), right=self._right)
        try:
            yield trials
        finally:
            trials.close()
            torch.cuda.empty_cache()


def job_of(task: Task, config: KernelConfig, device: Device) -> Job:
    """What the binary depends on and no more, so that tasks share it."""
    problem = task.problem
    cut = plan(problem, device, config.kernel).cut
    one_size = dataclasses.replace(problem, batch=1, total_q=1, max_q=1, capacity_k=1, max_k=1)
    return Job(one_size, config, Plan(cut, 2 if cut else 1, kernel=config.kernel), device)


class Trials:
    """A task's tensors; ``copies`` of its inputs, None: as many as exceed the L2 cache.

    What is in ``right`` is not run on the small inputs again, and what they found right is added.
    """

    def __init__(
        self,
        task: Task,
        where: torch.device,
        timer: Timer,
        copies: int | None = None,
        right: Right | None = None,
    ) -> None:
        self.task = task
        self.where = where
        self.timer = timer
        self.function: Callable[..., Any] = getattr(api, task.function)
        self.device = devices.describe(where)
        self.default = heuristic(task.problem, self.device)
        self._samplers: dict[KernelConfig, list[Sampler]] = {}
        self._small_case = small_case(task, self.device)
        self._right: Right = set() if right is None else right
        first = build(task, where)
        if copies is None:
            memory = [x.untyped_storage() for x in first[0]]  # latent values have none of their own
            size = sum({x.data_ptr(): x.nbytes() for x in memory}.values())
            cache = devices.l2_bytes(where)
            copies = 1 if size > 4 * cache else min(MOST_COPIES, math.ceil(2 * cache / size) + 1)
        self.calls = [first, *(build(task, where) for _ in range(copies - 1))]
        # Of each situation.
        self._calls = [self._in_situation(situation) for situation in task.situations]

    @functools.cached_property
    def _small(self) -> _Small:
        return _Small(self._small_case, self.where)

    def _in_situation(self, situation: Task) -> list[CallTensors]:
        calls = self.calls
        if situation.is_mixed:
            count = len(calls) if situation.family == "prefill" else max(len(calls), TURNS)
            calls = [with_lengths(calls[i % len(calls)], situation, i) for i in range(count)]
        problem = validate(Call(situation.function, **named(situation.function, calls[0])))
        if key_of(problem) != self.task.key:
            raise RuntimeError(
                f"{situation} makes a call of bucket {key_of(problem)}, not {self.task.key}"
            )
        return calls

    def check(self, config: KernelConfig) -> str:
        """Small inputs against the oracle, and every row of the large ones' output written.

        Of all that ``time`` would run.
        """
        configs = dict.fromkeys(
            self._suited(config, situation) for situation in self.task.situations
        )
        return next(filter(None, map(self._check, configs)), "")

    def _check(self, config: KernelConfig) -> str:
        known = (repr(self._small_case), config)
        with self._guard(config), force(config):
            if known not in self._right:
                if wrong := self._small.wrong(self.function):
                    return wrong
                self._right.add(known)
            args, options = self.calls[0]
            options["out"].fill_(math.nan)
            self.function(*args, **options)
            if not bool(options["out"].isfinite().all()):
                return "rows of out are not finite at full size"
        return ""

    def time(self, config: KernelConfig, replays: int = 1) -> tuple[float, ...]:
        """The default stands for the heuristic's choice, which may differ among situations."""
        with self._guard(config):
            if config not in self._samplers:
                self._samplers[config] = [
                    self.timer(
                        functools.partial(self._run, self._suited(config, situation), calls),
                        len(calls),
                    )
                    for situation, calls in zip(self.task.situations, self._calls, strict=True)
                ]
            return tuple(sampler(replays) for sampler in self._samplers[config])

    def _suited(self, config: KernelConfig, situation: Task) -> KernelConfig:
        if config != self.default:
            return config
        return heuristic(situation.problem, self.device)

    def _run(self, config: KernelConfig, calls: Sequence[CallTensors], i: int) -> None:
        args, options = calls[i % len(calls)]
        with force(config):
            self.function(*args, **options)

    @contextlib.contextmanager
    def _guard(self, config: KernelConfig) -> Iterator[None]:
        """After a failure, whether the GPU can still be used."""
        try:
            yield
        except Exception as error:
            if self.where.type == "cuda":
                try:
                    torch.cuda.synchronize(self.where)
                except RuntimeError as lost:
                    raise GpuLostError(
                        f"{self.task}: {config} broke the GPU's context ({one_line(error)}); run "
                        "the command again, what was tuned before is saved"
                    ) from lost
            raise

    def close(self) -> None:
        for held in (self._samplers, self.calls, self._calls):
            held.clear()


class _Small:
    """A call with odd lengths, its oracle computed once."""

    def __init__(self, case: Case, where: torch.device) -> None:
        self.args, self.options = case.build(where)
        oracle = getattr(reference, case.function)
        truth = oracle(*self.args, **self.options)
        fair = oracle(*self.args, **self.options, compute_dtype=case.dtype)
        self.budget = Budget(truth, fair, dtype=case.dtype)
        self.factor = error_factor(self.args, self.options)
        self.out = torch.empty(truth.shape, dtype=case.dtype, device=where)

    def wrong(self, function: Callable[..., Any]) -> str:
        # Poisoned each time, or what one configuration leaves out another would have left there.
        self.out.fill_(math.nan)
        function(*self.args, **self.options, out=self.out)
        try:
            self.budget.check(self.out, self.factor)
        except AssertionError as error:
            return str(error).splitlines()[0]
        return ""


# Timers: what makes samplers of runs


def graph_timer(where: torch.device) -> Timer:
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(where)

    def prepare(run: Callable[[int], None], copies: int) -> Sampler:
        def captured(calls: int) -> Sampler:
            # One pool serves all graphs: they run one after another and keep nothing.
            graph = capture([functools.partial(run, i) for i in range(calls)], stream, pool)
            last = 1.0  # microseconds of a replay

            def sample(replays: int) -> float:
                nonlocal last
                replays = max(1, min(replays, int(MOST_US / last)))
                events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
                with torch.cuda.stream(stream):
                    # While it runs, all others are issued: whatever the host is busy with besides,
                    # no pause is measured.
                    graph.replay()
                    events[0].record()
                    for event in events[1:]:
                        graph.replay()
                        event.record()
                    events[-1].synchronize()
                times = [before.elapsed_time(after) for before, after in pairwise(events)]
                last = statistics.median(times) * 1e3
                return last / calls

            return sample

        sample = captured(copies)
        rounds = math.ceil(GRAPH_US / (sample(2) * copies))
        calls = min(MOST_CALLS // copies, rounds) * copies
        return sample if calls <= copies else captured(calls)

    return prepare
