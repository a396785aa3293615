"""Compiling for any GPU in processes of their own: all cores at once, and a crash costs one job.

The processes compile although the parent may interpret, and leave their binaries in Triton's cache
on the disk, where the parent then finds them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from ..device import Device
from ..plan import Plan
from ..problem import Problem
from .compile import Report
from .config import KernelConfig
from .search import one_line

TIME_LIMIT = 180.0  # seconds without any result, after which what is left is given up


class Job(NamedTuple):
    problem: Problem
    config: KernelConfig
    plan: Plan
    device: Device


def cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def compile_all(
    jobs: Sequence[Job], processes: int | None = None, time_limit: float = TIME_LIMIT
) -> Iterator[tuple[Job, Report | str]]:
    """Each job with its Report, or with the reason why there is none, in the order they finish."""
    left = list(dict.fromkeys(jobs))
    count = min(processes or cores(), len(left))
    while left:
        is_broken = False
        with _running(left, count) as running:
            for future, is_late in _finished(running, time_limit):
                error = None if is_late else future.exception()
                if isinstance(error, BrokenProcessPool):
                    is_broken = True
                    continue
                job = running[future]
                left.remove(job)
                if is_late:
                    yield job, f"not compiled within {time_limit:g} seconds"
                else:
                    yield job, one_line(error) if error else future.result()
        if is_broken and count == 1:  # one process takes the jobs in order
            yield left.pop(0), "crashed the compiler"
        count = 1


def _finished(
    futures: Iterable[Future[Report | str]], time_limit: float
) -> Iterator[tuple[Future[Report | str], bool]]:
    """Each with whether it was given up."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=time_limit, return_when=FIRST_COMPLETED)
        if not done:
            yield from ((future, True) for future in pending)
            return
        yield from ((future, False) for future in done)


@contextlib.contextmanager
def _running(jobs: Sequence[Job], processes: int) -> Iterator[dict[Future[Report | str], Job]]:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, initializer=_begin)
    # Processes start as jobs are submitted, and read this when they import the package.
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "0"
    try:
        futures = {pool.submit(_compile, job): job for job in jobs}
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    alive = list((pool._processes or {}).values())
    try:
        yield futures
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in alive:
            process.terminate()


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle


def _compile(job: Job) -> Report | str:
    from .compile import compile_attention

    try:
        return compile_attention(job.problem, job.config, job.plan, job.device)
    except Exception as error:  # whatever a compiler raises, this configuration is not for us
        return one_line(error)
