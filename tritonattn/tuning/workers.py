"""Compiling for any GPU in processes of their own: all cores at once, and a crash costs one job.

The processes compile although the parent may interpret, and leave their binaries in Triton's cache
on the disk, where the parent then finds them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterable, Iterator, Sequence
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


def compile_all(jobs: Sequence[Job], processes: int | None = None) -> dict[Job, Report | str]:
    """Each job's Report, or the reason why there is none."""
    with contextlib.closing(Compilers(processes)) as compilers:
        return dict(compilers.compile(jobs))


class Compilers:
    """Processes that stay until ``close``; by default one for each core but one.

    That one is left to whoever times meanwhile what is compiled already.
    """

    def __init__(self, processes: int | None = None, time_limit: float = TIME_LIMIT) -> None:
        self.processes = processes or max(1, cores() - 1)
        self.time_limit = time_limit
        self._pool: ProcessPoolExecutor | None = None
        self._size = 0
        self._begun: dict[Job, Future[Report | str]] = {}

    def foresee(self, jobs: Sequence[Job]) -> None:
        """Begin with jobs that ``compile`` will be asked for, after those foreseen before."""
        with contextlib.suppress(BrokenProcessPool):  # whoever waits for them finds out
            self._submit(jobs, self.processes)

    def compile(self, jobs: Sequence[Job]) -> Generator[tuple[Job, Report | str], None, None]:
        """Each with its Report or the reason why there is none, in the order they finish."""
        left = list(dict.fromkeys(jobs))
        size = self.processes
        while left:
            # After a crash one at a time, since only then is it known whose it was.
            wanted = left[:1] if size == 1 else list(left)
            is_alone = size == 1 and self._begun.keys() <= set(wanted)
            is_broken = False
            futures: dict[Future[Report | str], Job] = {}
            try:
                futures = self._submit(wanted, size)
                for future, is_late in _finished(futures, self.time_limit):
                    error = None if is_late else future.exception()
                    if isinstance(error, BrokenProcessPool):
                        is_broken = True
                        continue
                    job = futures[future]
                    left.remove(job)
                    if is_late:
                        yield job, f"not compiled within {self.time_limit:g} seconds"
                    else:
                        yield job, one_line(error) if error else future.result()
            except BrokenProcessPool:  # one that was foreseen crashed it, or one of these already
                is_broken = True
            finally:
                # Broken, late, or not wanted any longer.
                if is_broken or not all(future.done() for future in futures):
                    self.close()
            for job in wanted:
                self._begun.pop(job, None)
            if is_broken and is_alone:
                yield left.pop(0), "crashed the compiler"
            size = 1

    def close(self) -> None:
        self._begun.clear()
        if self._pool is not None:
            alive = list((self._pool._processes or {}).values())
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in alive:
                process.terminate()
            self._pool = None

    def _submit(self, jobs: Sequence[Job], size: int) -> dict[Future[Report | str], Job]:
        if self._size != size:
            self.close()
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(size, context, initializer=_begin)
            self._size = size
        # Processes start as jobs are submitted, and read this when they import the package.
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "0"
        try:
            for job in jobs:
                if job not in self._begun:
                    self._begun[job] = self._pool.submit(_compile, job)
        finally:
            if before is None:
                del os.environ["TRITON_INTERPRET"]
            else:
                os.environ["TRITON_INTERPRET"] = before
        return {self._begun[job]: job for job in jobs}


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


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if hasattr(os, "nice"):
        os.nice(5)  # the parent's turn comes first: a GPU waits for it


def _compile(job: Job) -> Report | str:
    import triton

    from .compile import compile_attention

    # Of a big kernel 8 MB of intermediate code would be written, and read and kept by the parent.
    triton.knobs.compilation.store_binary_only = job.device.backend == "cuda"
    try:
        return compile_attention(job.problem, job.config, job.plan, job.device)
    except Exception as error:  # whatever a compiler raises, this configuration is not for us
        return one_line(error)
