"""The command ``tritonattn bench``."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import settings
from ..console import count
from ..device import interpreting
from . import catalogue, peers, plots, tables
from .cases import Case, select, tiny
from .compare import compare
from .gpu import LostError, versions
from .progress import Progress, show
from .report import FAILED, OWN, REPLACED, WRONG, Report
from .session import run_case
from .timing import QUICK, Effort
from .worker import Runs, Setup, Worker, this_machine

DESCRIPTION = """\
Times attention on this machine's GPU beside its peers and the card's own limits. Every result is
checked before it is timed; times are medians of graph replays, all candidates interleaved. Exit
code 1: a result of ours was wrong or failed, or --base found a slower row."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    add = parser.add_argument
    add(
        "--case", action="append", metavar="NAME",
        help="a group, a name, a part of one or a glob; may be repeated; default: all but the "
        "groups sweep-* and smoke",
    )  # fmt: skip
    add(
        "--sweep", action="append", choices=catalogue.SWEEPS, metavar="SIZE",
        help=f"time against a size, of {', '.join(catalogue.SWEEPS)}; may be repeated, and be "
        "given beside --case",
    )  # fmt: skip
    add(
        "--against", metavar="PEERS",
        help=f"comma-separated, of {', '.join(peers.MODULES)}, or none; default: all that import",
    )  # fmt: skip
    add("--list", action="store_true", help="only show the cases with their work")
    add("--check", action="store_true", help="only check the results, time nothing")
    add("--quick", action="store_true", help="fewer and shorter rounds")
    add("--rounds", type=int, metavar="N", help=f"rounds of timing (default {Effort().rounds})")
    add("--json", type=Path, metavar="FILE", help="write all samples, after every case")
    add("--base", type=Path, metavar="OLD.json", help="name what got slower than the noise since")
    add("--plot", type=Path, metavar="FILE.png", help="draw bars against peers and ceiling")
    add("--show", type=Path, metavar="FILE.json", help="measure nothing: show an earlier report")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, 1 (see DESCRIPTION), 2 for arguments that cannot be obeyed, 130 interrupted."""
    try:
        _refuse_what_contradicts(args)
        base = Report.load(args.base) if args.base else None
        if args.plot:
            plots.check(args.plot)
        if args.show:
            return _conclude(Report.load(args.show), base, args)
        patterns = [*(args.case or []), *(f"sweep-{size}" for size in args.sweep or [])]
        cases = _cases(patterns)
        names = peers.chosen(args.against.split(",") if args.against is not None else None)
        if args.rounds is not None and args.rounds < 1:
            raise ValueError(f"--rounds must be at least 1; got {args.rounds}")
        if not args.list and not args.check:
            _refuse_what_needs_figures(args)
    except (ValueError, ImportError) as error:
        print(f"tritonattn bench: {error}", file=sys.stderr)
        return 2
    if args.list:
        print(tables.listing(cases))
        number = count(len(cases), "case")
        print(f"{number}; --case and --sweep choose, also of those that do not run by default")
        return 0
    if interpreting():
        return _interpret(cases)
    try:
        return _measure(cases, names, base, args)
    except OSError as error:
        print(f"tritonattn bench: {error}", file=sys.stderr)
        return 2
    except LostError as error:
        print(f"tritonattn bench: no process can use the GPU: {error}", file=sys.stderr)
        return 1


def _cases(patterns: Sequence[str]) -> list[Case]:
    if patterns:
        return select(catalogue.ALL, patterns)
    return [case for case in catalogue.ALL if case.group in catalogue.DEFAULT_GROUPS]


def _refuse_what_contradicts(args: argparse.Namespace) -> None:
    measuring = ("against", "check", "quick", "rounds", "json")
    for doing, why, ignored in (
        ("show", "--show measures nothing", ("case", "sweep", "list", *measuring)),
        ("list", "--list only lists", (*measuring, "base", "plot")),
        ("check", "--check gives no figures", ("base", "plot", "quick", "rounds")),
    ):
        for name in ignored if getattr(args, doing) else ():
            if getattr(args, name):
                raise ValueError(f"{why}: leave --{name} out")


def _refuse_what_needs_figures(args: argparse.Namespace) -> None:
    if interpreting():
        for name in ("json", "base", "plot"):
            if getattr(args, name):
                raise ValueError(f"--{name} needs figures, and without a GPU there are none")
    elif settings.CHECK:
        raise ValueError("TRITONATTN_CHECK=1 makes every call wait: unset it, or give --check")


def _interpret(cases: Sequence[Case]) -> int:
    print(
        "No GPU is used here, so nothing is timed: tiny versions of the cases run through Triton's "
        "interpreter, and their results are checked. --list shows the cases as they are.",
        flush=True,
    )
    bad = 0
    with Progress(len(cases)) as progress:
        for case in cases:
            progress.begin(case.name)
            start = time.perf_counter()
            row = run_case(tiny(case), torch.device("cpu"), {}, 0, None, QUICK)
            progress.end(row, time.perf_counter() - start)
            bad += row.results[OWN].status in (WRONG, FAILED)
    print(f"{len(cases) - bad} of {len(cases)} right")
    return 1 if bad else 0


def _measure(
    cases: Sequence[Case], names: Sequence[str], base: Report | None, args: argparse.Namespace
) -> int:
    effort = QUICK if args.quick else Effort()
    if args.rounds is not None:
        effort = replace(effort, rounds=args.rounds)
    setup = Setup(this_machine, tuple(names), None if args.check else effort)
    stopped = is_lost = False
    with contextlib.closing(Runs(partial(Worker, setup))) as runs:
        card, loaded, notes = runs.hello
        report = Report(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            device=asdict(card),
            versions=versions(),
            settings={
                "cases": [*(args.case or []), *(args.sweep or [])],
                "effort": asdict(effort),
                "checked_only": args.check,
                REPLACED: runs.replaced,
            },
            peers=notes,
        )
        if args.json:
            report.save(args.json)  # now, so that a place that cannot be written is known at once
        against = ", ".join(loaded) or "nobody"
        print(f"{card.name}: {len(cases)} cases against {against}", flush=True)
        try:
            for name, note in (runs.ask("compile_ahead", cases) or {}).items():
                notes[name] += f" ({note})"
            with Progress(len(cases)) as progress:
                if not args.check:
                    progress.begin("ceilings")
                    report.ceilings = runs.ask("ceilings")
                for case in cases:
                    progress.begin(case.name)
                    start = time.perf_counter()
                    row = runs.row(case)
                    report.rows.append(row)
                    progress.end(row, time.perf_counter() - start)
                    if args.json:
                        report.save(args.json)
            if not args.check:
                report.ceilings_after = runs.ask("ceilings")
        except KeyboardInterrupt:
            stopped = True
            print("interrupted: what there is so far")
        except LostError as error:
            is_lost = True
            print(f"no process can use the GPU any more: {error}; what there is so far")
    if args.json:
        report.save(args.json)
    code = _conclude(report, base, args)
    return 130 if stopped else max(code, is_lost)


def _conclude(report: Report, base: Report | None, args: argparse.Namespace) -> int:
    """Show the report and what follows from it; the exit code."""
    versions_of: dict[str, Any] = report.versions
    about = ", ".join(f"{name} {version}" for name, version in versions_of.items())
    print(f"\n{report.device.get('name')}, {report.date}; {about}")
    for table in tables.tables(report):
        print()
        show(table)
    print("\n".join(["", *tables.summary(report), "", *tables.notes(report)]), flush=True)
    bad = any(row.results[OWN].status in (WRONG, FAILED) for row in report.rows)
    if base is not None:
        found = compare(base, report)
        print("\n".join(["", *tables.comparison(found, str(args.base))]))
        bad = bad or bool(found.slower or found.lost)
    if args.plot:
        plots.plot(report, args.plot)
        print(f"drawn: {args.plot}")
    return 1 if bad else 0
