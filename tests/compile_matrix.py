"""Compile every kernel with the configurations that ship, for every GPU, with none at hand.

    python tests/compile_matrix.py [--targets 80 gfx942] [--thin] [--jobs 2] [--verbose]

Prints a table and fails if a kernel does not compile, does not fit, or spills although its heads
are of 128 dims or less and its numbers of 16 bits.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

# Kernels are interpreted or compiled as this says when tritonattn is imported, here and in workers.
os.environ["TRITON_INTERPRET"] = "0"

TARGETS = ["75", "80", "86", "89", "90", "100", "120", "gfx90a", "gfx942", "gfx950", "gfx1100"]
# These stand for their kin, and get every case; the others get the core.
WHOLE = ["80", "90", "gfx942"]
# Of these, what differs from the other's, for which code is generated in the same way.
KIN = {"86": "80", "89": "80"}
TENSOR_MEMORY = 512  # columns
# Outside loops, where they cost nothing: ptxas gives up a register or two if that lets one more
# block run beside, LLVM a few more.
FEW_BYTES = 32
# Hopper's kernel is a loop over tiles of queries as a whole: what it puts aside once for each of
# these, around the loop over keys that they all see, costs nothing either.
HOPPER_BYTES = 96


class Job(NamedTuple):
    target: str
    case: str
    index: int  # among the launches that the case's call makes


class Result(NamedTuple):
    seconds: float
    error: str = ""
    kernel: str = ""
    shared: int = 0
    registers: int = 0
    spilled: int = 0
    in_loops: int = 0


def device_of(target: str):
    from tritonattn import device

    return device.target(int(target) if target.isdigit() else target)


def distinct(targets: Iterable[str], thin: bool, names: Iterable[str] = ()) -> list[Job]:
    """One job for each binary."""
    import launches

    jobs: dict[tuple, Job] = {}
    for target in targets:
        device = device_of(target)
        whole = bool(names) or (target in WHOLE and not thin)
        cases = launches.CORE + whole * launches.MORE
        if target == "90":
            cases += launches.HOPPER_CORE + whole * launches.HOPPER_MORE
        for case in cases:
            if names and case.name not in names:
                continue
            for index, launch in enumerate(case.launches(device)):
                if (KIN.get(target), launch.key) not in jobs:
                    jobs.setdefault((target, launch.key), Job(target, case.name, index))
    return list(jobs.values())


def compile_one(job: Job) -> Result:
    import launches
    import triton

    from tritonattn import binaries
    from tritonattn.tuning.compile import report

    device = device_of(job.target)
    case = next(case for case in launches.ALL_CASES if case.name == job.case)
    launch = case.launches(device)[job.index]
    kernel = f"{launch.kernel.__name__} {describe(launch)}"
    start = time.perf_counter()
    arguments = (launch.kernel, launch.args, launch.constants, launch.options, device)
    try:
        with contextlib.redirect_stdout(None):  # a compiler's complaint is a kernel's whole text
            binary = binaries.compile_for(*arguments)
            if "llir" not in binary.asm:  # the tuner's, which leaves binaries alone in the cache
                with triton.knobs.compilation.scope():
                    triton.knobs.compilation.always_compile = True
                    triton.knobs.compilation.store_binary_only = False
                    binary = binaries.compile_for(*arguments)
        found = report(binary)
    except Exception as error:  # whatever a compiler raises is a finding
        lines = str(error).strip().splitlines() or [""]
        return Result(time.perf_counter() - start, f"{type(error).__name__}: {lines[-1]}", kernel)
    error = ""
    if found.shared > device.shared_memory:
        error = f"needs {found.shared} bytes of shared memory, over {device.shared_memory}"
    elif found.tensor_memory > TENSOR_MEMORY:
        error = f"needs {found.tensor_memory} columns of tensor memory, over {TENSOR_MEMORY}"
    elif launch.estimate is not None and found.shared > launch.estimate:
        error = f"needs {found.shared} bytes of shared memory, {launch.estimate} were expected"
    elif case.dtype.itemsize == 4 and adds_on(binary.asm["ttir"]):
        error = "adds a float32 product to another sum"
    elif case.must_not_spill:
        if launch.kernel.__name__ == "prefill_kernel":
            spills = found.spill_bytes > HOPPER_BYTES
        else:
            spills = found.spill_bytes > FEW_BYTES or found.spills_in_loops > 0
        if spills:
            error = "spills"
    return Result(
        time.perf_counter() - start, error, kernel, found.shared, found.registers,
        found.spill_bytes, found.spills_in_loops,
    )  # fmt: skip


def adds_on(code: str) -> bool:
    """Whether a product of tiles starts from anything but zero: the sum would be a long one."""
    return len(re.findall(r"tt\.dot %\S+, %\S+, %", code)) > len(
        re.findall(r"tt\.dot %\S+, %\S+, %cst", code)
    )


def compile_all(jobs: list[Job], processes: int) -> Iterator[tuple[Job, Result]]:
    """Each job's result, in the order they finish; a job that ends its process is found out."""
    left = list(jobs)
    while left:
        crashed = False
        # Not forked: torch's threads are not there in a fork, and it waits for them.
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            running = {pool.submit(compile_one, job): job for job in left}
            for done in as_completed(running):
                try:
                    result = done.result()
                except BrokenProcessPool:
                    crashed = True
                    continue
                left.remove(running[done])
                yield running[done], result
        if crashed and processes == 1:  # jobs run in order
            yield left.pop(0), Result(0.0, "ends the compiler's process")
        processes = 1


def describe(launch) -> str:
    spec = launch.constants.get("SPEC")
    tile = f"{spec.BLOCK_M}x{spec.BLOCK_N}, " if spec else ""
    return f"({tile}{launch.options.num_warps} warps, {launch.options.num_stages} stages)"


def table(targets: Iterable[str], results: dict[Job, Result]) -> str:
    columns = ("target", "binaries", "shared", "limit", "registers", "spilling", "failed", "time")
    lines = ["  ".join(f"{column:>9}" for column in columns)]
    for target in targets:
        mine = [result for job, result in results.items() if job.target == target]
        if not mine:  # --cases that are not compiled for it
            continue
        row = (
            target, len(mine), max(r.shared for r in mine), device_of(target).shared_memory,
            max(r.registers for r in mine), sum(r.spilled > 0 for r in mine),
            sum(bool(r.error) for r in mine), round(sum(r.seconds for r in mine)),
        )  # fmt: skip
        lines.append("  ".join(f"{value:>9}" for value in row))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=TARGETS, choices=TARGETS, metavar="ARCH")
    parser.add_argument("--thin", action="store_true", help="the core cases alone")
    parser.add_argument("--cases", nargs="+", default=[], help="these alone", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--verbose", action="store_true", help="a line for each binary")
    options = parser.parse_args()

    import triton

    jobs = distinct(options.targets, options.thin, options.cases)
    print(f"triton {triton.__version__}: {len(jobs)} binaries", flush=True)
    results = {}
    for job, result in compile_all(jobs, options.jobs):
        results[job] = result
        if result.error or options.verbose:
            facts = (
                f"{result.shared} bytes shared, {result.registers} registers, "
                f"{result.spilled} bytes spilled ({result.in_loops} times in loops)"
            )
            line = f"{job.target:>7}  {job.case}: {result.kernel} {facts} {result.error}"
            print(line.rstrip(), flush=True)
    print(table(options.targets, results))
    return any(result.error for result in results.values())


if __name__ == "__main__":
    sys.exit(main())
