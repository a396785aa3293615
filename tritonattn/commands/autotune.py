"""``tritonattn autotune``: tables for this GPU, and how good they are."""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..console import Bar, columns, count
from ..device import Device, interpreting
from ..errors import ArgumentValueError, UnsupportedError
from ..tuning import space, store
from ..tuning.outcome import Outcome
from ..tuning.run import Comparison, Comparisons, Run, compare_all, tune_all
from ..tuning.search import Backend, Progress
from ..tuning.tables import path_of
from ..tuning.tasks import Task
from . import shapes

DESCRIPTION = """\
Measures which configuration of each kernel is fastest on this GPU and writes it to the user's
tables, which later processes read. What is found is written after every bucket, so that Ctrl-C and
--budget lose nothing. A configuration replaces the default only where it is surely 2 % faster."""
SECONDS_A_TASK = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    shapes.add_arguments(parser)
    add = parser.add_argument
    add("--budget", type=shapes.above_zero, metavar="MINUTES", help="begin nothing after so long")
    add("--dry-run", action="store_true", help="only list what would be measured")
    add("--check", action="store_true", help="time what the tables say against the heuristic")
    add(
        "--exhaustive", action="store_true",
        help="time also what is unlikely to win; with --check also says how far from the best",
    )  # fmt: skip
    add(
        "--missing", action="store_true",
        help="only buckets that no table has, or from other kernels than these: go on where "
        "--budget or Ctrl-C ended",
    )  # fmt: skip
    add("--sample", type=shapes.at_least_one, metavar="N", help="N of the buckets, drawn by --seed")
    add("--seed", type=int, default=0)
    add("--output", type=Path, metavar="DIR", help="tables to write; default: the user's")
    add("--plot", type=Path, metavar="FILE.png", help="draw the speed-ups")
    add(
        "--jobs", type=shapes.at_least_one, metavar="N",
        help="processes that compile; default: all cores but one",
    )  # fmt: skip
    shapes.add_target(parser, "only list, for another GPU than this machine's")


def run(args: argparse.Namespace) -> int:
    _refuse_what_contradicts(args)
    tasks, device = shapes.tasks_of(args), shapes.device_of(args)
    if args.missing:
        tasks = [task for task in tasks if _is_missing(task, device)]
        if not tasks:
            print("Every bucket was measured with these kernels already.")
            return 0
    if args.sample is not None and args.sample < len(tasks):
        tasks = random.Random(args.seed).sample(tasks, args.sample)
    if args.plot:
        import matplotlib  # noqa: F401 -- before minutes of measuring, not after
    if args.dry_run or args.target is not None:
        _list(tasks, device, args.exhaustive)
        if args.target is None and not interpreting():
            where = args.output or store.user_root() or Path("nowhere")
            print(f"They would be written to {path_of(where, device.name, '*')}.")
        return 0
    if interpreting():
        print(
            "No GPU is used here, so nothing can be timed. This is what would be measured; "
            "--target sm_90 lists it for another GPU, `tritonattn explain --target sm_90` compiles "
            "it, and `tritonattn cache` moves tables between machines."
        )
        _list(tasks, device, args.exhaustive)
        return 2
    where, _ = shapes.here()
    from ..tuning.trials import GpuBackend

    budget = math.inf if args.budget is None else args.budget * 60
    with contextlib.closing(GpuBackend(where, args.jobs)) as backend:
        if args.check:
            return check(tasks, device, backend, budget, args.exhaustive)
        return measure(tasks, device, backend, budget, args.exhaustive, args.output, args.plot)


def _refuse_what_contradicts(args: argparse.Namespace) -> None:
    ignored: tuple[str, ...] = ()
    if args.target is not None and not args.dry_run:
        ignored, why = ("check", "plot", "budget", "jobs", "output"), "--target only lists"
    elif args.check:
        ignored, why = ("plot", "output"), "--check writes no tables and draws nothing"
    for name in ignored:
        if getattr(args, name):
            raise ArgumentValueError(f"{why}: leave --{name} out")


def _is_missing(task: Task, device: Device) -> bool:
    entry = store.tuned(task.key, device)
    return entry is None or entry.is_stale


def measure(
    tasks: Sequence[Task],
    device: Device,
    backend: Backend,
    budget: float = math.inf,
    exhaustive: bool = False,
    output: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Tune, write and say what came of it; the exit code."""
    print(f"{device.title}: {count(len(tasks), 'bucket')}", flush=True)
    files: dict[Path, None] = {}
    began = time.monotonic()
    with Bar(len(tasks)) as bar:
        done = 0

        def save(task: Task, outcome: Outcome) -> None:
            nonlocal done
            done += 1
            files.update(
                dict.fromkeys(store.record(device, {outcome.key: outcome.entry()}, output))
            )
            seconds = f" [{time.monotonic() - began:.0f} s]"
            bar.line(f"[{done}/{len(tasks)}] {_line(task, outcome)}{seconds}")

        progress = Progress(_shower(bar, lambda: done))
        run_ = tune_all(
            tasks, device, backend, save, budget=budget, exhaustive=exhaustive, progress=progress
        )
    _conclude(run_, list(files), time.monotonic() - began)
    spent = ", ".join(f"{step} {seconds:.0f}" for step, seconds in progress.spent.items())
    print(f"seconds by step: {spent}")
    if plot is not None and run_.outcomes:
        draw(run_.outcomes, plot)
        print(f"drawn: {plot}")
    if run_.is_interrupted:
        return 130
    return 1 if run_.failures or run_.lost else 0


def check(
    tasks: Sequence[Task],
    device: Device,
    backend: Backend,
    budget: float = math.inf,
    exhaustive: bool = False,
) -> int:
    """Time the tables against the heuristic, or every candidate; the exit code."""
    buckets = count(len(tasks), "bucket")
    print(f"{device.title}: {buckets}, the tables against the heuristic", flush=True)
    with Bar(len(tasks)) as bar:
        done = 0

        def show(comparison: Comparison) -> None:
            nonlocal done
            done += 1
            bar.line(f"[{done}/{len(tasks)}] {comparison.task}: {comparison.found.origin}")

        compared = compare_all(
            tasks, device, backend, show, budget=budget, exhaustive=exhaustive,
            progress=Progress(_shower(bar, lambda: done)),
        )  # fmt: skip
    found = compared.found
    rows: list[Sequence[object]] = [("bucket", "from", "µs", "heuristic", "ratio")]
    rows[0] = (*rows[0], "regret") if exhaustive else rows[0]
    for c in found:
        row = (
            f"{c.task.family} {c.task.key}", c.found.origin, f"{c.us:.1f}", f"{c.heuristic_us:.1f}",
            f"{c.ratio:.3f}x",
        )  # fmt: skip
        rows.append((*row, f"{100 * c.regret:.1f}%") if exhaustive else row)
    print(columns(rows))
    if found:
        behind = statistics.median(100 * (c.ratio - 1) for c in found)
        print(f"The heuristic is {behind:.1f} % behind the tables in the median.")
        if exhaustive:
            regrets = sorted(100 * c.regret for c in found)
            p95 = regrets[min(len(regrets) - 1, math.ceil(0.95 * len(regrets)) - 1)]
            print(
                f"The tables are {statistics.median(regrets):.1f} % behind the best in the median, "
                f"{p95:.1f} % at the 95th percentile."
            )
    _shortfall(compared)
    if compared.is_interrupted:
        return 130
    return 0 if found and not compared.lost else 1


def _list(tasks: Sequence[Task], device: Device, exhaustive: bool) -> None:
    rows: list[Sequence[object]] = [("kernel", "bucket", "situation")]
    if not device.is_interpreter:
        rows[0] = (*rows[0], "candidates", "now from")
    total = 0
    for task in tasks:
        row: tuple[object, ...] = (task.family, task.key, f"{task.layer.title}; {task.shape}")
        if not device.is_interpreter:
            try:
                number = len(space.candidates(task.problem, device, exhaustive))
                row = (*row, number, store.find(task.problem, device).origin)
                total += number
            except UnsupportedError:
                row = (*row, 0, "cannot run")
        rows.append(row)
    print(columns(rows))
    minutes = count(math.ceil(len(tasks) * SECONDS_A_TASK / 60), "minute")
    configs = f", {total} configurations" if total else ""
    print(f"{count(len(tasks), 'bucket')}{configs}: about {minutes} on a GPU.")


def _shower(bar: Bar, done: Callable[[], int]) -> Callable[[Progress], None]:
    began = time.monotonic()

    def show(progress: Progress) -> None:
        rate = progress.configs / max(1e-9, time.monotonic() - began)
        best = f"best {progress.best}, " if progress.best else ""
        task = progress.task
        what = f"{task.family} {task.shape}: " if task else ""
        within = f"{progress.step} {progress.done}/{progress.total}"
        bar.at(done(), f"{rate:.1f} configs/s; {what}{best}{within}")

    return show


def _line(task: Task, outcome: Outcome) -> str:
    if math.isnan(outcome.default_us):
        gain = "the default does not work here"
    elif outcome.best == outcome.default:
        gain = "the default stays"
    else:
        gain = f"{outcome.speedup:.2f}x the default"
    refused = f"; {len(outcome.refused)} refused" if outcome.refused else ""
    cut = "; cut short" if outcome.is_cut_short else ""
    what = space.describe(outcome.best)
    return f"{task}: {outcome.us:.1f} µs, {gain} ({what}{refused}{cut})"


def _conclude(run_: Run, files: Sequence[Path], seconds: float) -> None:
    rows: list[Sequence[object]] = [("kernel", "bucket", "default µs", "tuned µs", "speed-up")]
    for _, outcome in run_.outcomes:
        default = "-" if math.isnan(outcome.default_us) else f"{outcome.default_us:.1f}"
        ratio = "-" if math.isnan(outcome.default_us) else f"{outcome.speedup:.2f}x"
        rows.append((outcome.key.family, outcome.key, default, f"{outcome.us:.1f}", ratio))
    if run_.outcomes:
        print(columns(rows))
        ratios = [o.speedup for _, o in run_.outcomes if not math.isnan(o.speedup)]
        if ratios:
            print(
                f"geometric mean {statistics.geometric_mean(ratios):.3f}x, {seconds:.0f} s in all"
            )
    _shortfall(run_)
    for path in files:
        print(f"written: {path}")


def _shortfall(of: Run | Comparisons) -> None:
    """What was not done, and why."""
    for task, reason in of.failures:
        print(f"failed: {task}: {reason}")
    if of.lost:
        print(f"stopped: {of.lost}")
    if of.left:
        print(f"not reached: {count(len(of.left), 'bucket')}")


def draw(outcomes: Sequence[tuple[Task, Outcome]], path: Path) -> None:
    """Bars of the speed-ups over the default."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    known = [(task, o) for task, o in outcomes if not math.isnan(o.speedup)]
    names = [f"{task.family} {outcome.key}" for task, outcome in known]
    figure, axes = pyplot.subplots(figsize=(11, 1 + 0.3 * len(known)), layout="constrained")
    axes.barh(names, [outcome.speedup for _, outcome in known])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("speed-up over the heuristic's choice")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
