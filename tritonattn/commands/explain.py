"""``tritonattn explain``: what a call would run and why, on this machine's GPU or any other."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from ..device import Device
from ..errors import UnsupportedError
from ..plan import HOPPER, NO_LIMIT, PORTABLE, Kind, kinds, plan
from ..tuning import space, store
from ..tuning.compile import Report
from ..tuning.keys import family_of, key_of
from ..tuning.store import Found
from ..tuning.tasks import Task, describe
from ..tuning.workers import Job, compile_all
from . import shapes

DESCRIPTION = """\
Shows the way of a call: the problem, the plan, the configuration and where it comes from, and what
the compiled kernel takes. With --target no GPU is needed."""


KERNEL_NAMES = {PORTABLE: "attention_kernel", HOPPER: "prefill_kernel"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    shapes.add_arguments(parser)
    shapes.add_target(parser, "explain for this GPU")
    parser.add_argument("--no-compile", action="store_true", help="leave the binaries out")


def run(args: argparse.Namespace) -> int:
    device = shapes.device_of(args)
    tasks = shapes.tasks_of(args)
    if not args.shape:
        tasks = _first_of_each(tasks)
    launches: dict[Task, list[_Launch]] = {}
    failures: dict[Task, str] = {}
    for task in tasks:
        try:
            launches[task] = [_launch(kind, device) for kind in kinds(task.problem, device)]
        except UnsupportedError as error:
            failures[task] = str(error)
    print(device.title)
    if device.is_interpreter:
        print("No GPU is used here, so nothing is compiled. --target sm_90 explains for a GPU.")
    reports: dict[Job, Report | str] = {}
    if not device.is_interpreter and not args.no_compile:
        reports = compile_all([launch.job for mine in launches.values() for launch in mine])
    for task in tasks:
        print()
        print(f"call     {task}")
        print(f"problem  {describe(task.problem)}")
        if task in failures:
            print(f"cannot run: {failures[task]}")
        for launch in launches.get(task, ()):
            _explain(launch, reports.get(launch.job), device)
    return 1 if failures or any(isinstance(report, str) for report in reports.values()) else 0


def _first_of_each(tasks: list[Task]) -> list[Task]:
    """One situation of each kernel, of each layer and cache."""
    first: dict[tuple[object, ...], Task] = {}
    for task in tasks:
        about = (task.layer, task.family, task.dtype, task.cache_dtype, task.page_size)
        first.setdefault(about, task)
    return list(first.values())


class _Launch(NamedTuple):
    kind: Kind
    found: Found
    job: Job


def _launch(kind: Kind, device: Device) -> _Launch:
    found = store.find(kind.problem, device)
    its_plan = plan(kind.problem, device, found.config.kernel)
    return _Launch(kind, found, Job(kind.problem, found.config, its_plan, device))


def _explain(launch: _Launch, report: Report | str | None, device: Device) -> None:
    arch = f"sm_{device.arch}" if device.backend == "cuda" else device.arch
    kind, found, job = launch
    if kind.most_q < NO_LIMIT:
        print(f"launch   for sequences of at most {kind.most_q} queries")
    elif kind.least_q:
        print(f"launch   for sequences of {kind.least_q} queries or more")
    kernel = KERNEL_NAMES[found.config.kernel]
    print(f"kernel   {kernel}{_why(kind, found, device)}")
    splits, parts = job.plan.num_splits, "in one part"
    if job.plan.cut == "parts":
        parts = f"in {splits} parts"
        if job.plan.split_keys:
            parts = f"in parts of {job.plan.split_keys}, at most {splits}"
    elif job.plan.cut == "shares":
        parts = f"in equal shares for {job.plan.programs} programs, by the lengths on the device"
    print(f"plan     keys {parts}")
    print(f"bucket   {family_of(kind.problem)} {key_of(kind.problem)}")
    print(f"config   {space.describe(found.config)}")
    print(f"from     {origin(found)}")
    if report is None:
        return
    if isinstance(report, str):
        print(f"binary   {kernel} for {arch}: {report}")
        return
    spills = f"{report.spill_bytes} bytes spilled" if report.spill_bytes else "no spills"
    if report.spills_in_loops:
        spills += f", {report.spills_in_loops} instructions of it in loops"
    columns = f", {report.tensor_memory} columns of tensor memory" if report.tensor_memory else ""
    print(
        f"binary   {kernel} for {arch}: {report.registers} registers, "
        f"{report.shared / 1024:.1f} of {device.shared_memory / 1024:.0f} KiB shared memory"
        f"{columns}, {spills}"
    )
    if job.plan.cut == "parts":
        print("         merge_kernel, which joins the parts of what was cut")


def _why(kind: Kind, found: Found, device: Device) -> str:
    """Why not Hopper's kernel, where that is a question."""
    if found.config.kernel == HOPPER or (device.backend, device.arch) != ("cuda", 90):
        return ""
    return f": {plan(kind.problem, device).why or 'as its configuration says'}"


def origin(found: Found) -> str:
    if found.entry is None:
        return {
            "heuristic": "the heuristic: no table has this bucket or one near it",
            "forced": "a forced configuration",
        }[found.origin]
    times = f"{found.entry.us:.1f} µs, the default {found.entry.default_us:.1f} µs"
    stale = ", measured with other kernels: a guess" if found.entry.is_stale else ""
    made = f"{times}, {found.entry.date}{stale}"
    if found.entry.config is None:
        made = f"the heuristic, than which nothing was clearly faster: {made}"
    if found.origin == "tuned":
        return f"{found.table}: {made}"
    kind = "the nearest bucket" if found.origin == "nearest" else "a related GPU's bucket"
    return f"{found.table}, {kind}: {found.key} ({made})"
