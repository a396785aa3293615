"""``tritonattn fuzz``: random calls against the reference, failures as calls to paste."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..case import Case
from ..console import Bar, count
from ..device import Device
from ..tuning.models import FUNCTIONS
from . import shapes

DESCRIPTION = """\
Draws whole calls at random (lengths, layouts, options, dtypes), runs them on this machine's GPU or
interpreter and compares with the float64 reference. A failure is shrunk and printed as a call that
can be pasted into Python. Wants hypothesis, which the extra `test` brings. Exit code 1: a failure
was found."""
BATCH = 25  # examples of one function before the next has its turn


class GpuLost(BaseException):
    """After which every call would fail: past hypothesis, which would go on and shrink."""


@dataclass
class Findings:
    examples: int = 0
    failures: dict[str, str] = field(default_factory=dict)  # the call to paste: what is wrong


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("--minutes", type=shapes.above_zero, default=1.0, metavar="N", help="default: 1")
    add(
        "--function", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS), metavar="NAME",
        help=f"of {', '.join(FUNCTIONS)}; default: all",
    )  # fmt: skip
    add("--seed", type=int, help="the same seed draws the same calls; default: from the clock")
    add(
        "--max-len",
        type=shapes.at_least_one,
        metavar="TOKENS",
        help="default: 70 interpreted, 700 on a GPU",
    )


def run(args: argparse.Namespace) -> int:
    import triton  # noqa: F401 -- without which every call would be a failure

    from .. import strategies
    from ..testing import check

    where, device = shapes.here()
    seed = int(time.time()) if args.seed is None else args.seed
    max_len = args.max_len or (70 if device.is_interpreter else 700)
    print(f"{device.title}: for {args.minutes:g} minutes, --seed {seed}, up to {max_len} tokens")
    if device.is_interpreter:
        print("No GPU is used here: the same kernels run through Triton's interpreter, slowly.")
    draw = {
        "varlen_attention": strategies.varlen_cases,
        "prefix_attention": strategies.prefix_cases,
        "paged_attention": strategies.paged_cases,
    }
    dtypes = [dtype for dtype in strategies.DTYPES if _has(device, dtype)]
    sources = [draw[name](max_len=max_len, dtypes=dtypes) for name in args.function]

    def test(case: Case) -> None:
        try:
            check(case, device=where)
        except Exception as error:
            if where.type == "cuda" and not _is_alive():
                raise GpuLost from error
            raise

    found = hunt(sources, test, seed, 60 * args.minutes, str(where))
    print(f"{count(found.examples, 'call')}, {count(len(found.failures), 'failure')}")
    return 1 if found.failures else 0


def hunt(
    sources: list[Any],
    test: Callable[[Case], None],
    seed: int,
    seconds: float,
    where: str = "cpu",
) -> Findings:
    """Draw from each strategy in turn until the time is up; every failure is printed once."""
    found = Findings()
    deadline = time.monotonic() + seconds
    turn = 0
    with Bar(100) as bar:

        def timed(case: Case) -> None:
            found.examples += 1
            left = max(0.0, deadline - time.monotonic())
            bar.at(100 * (1 - left / max(seconds, 1e-9)), f"{found.examples} calls")
            test(case)

        while time.monotonic() < deadline or not turn:
            batch_seed = seed + turn // len(sources)
            failure, is_lost = _batch(sources[turn % len(sources)], timed, batch_seed, deadline)
            if failure is not None:
                _report(*failure, found, bar, where)
            if is_lost:
                bar.line("It broke the GPU's context, so it could not be shrunk; stopping here.")
                break
            turn += 1
    return found


def _batch(
    strategy: Any, test: Callable[[Case], None], seed: int, deadline: float
) -> tuple[tuple[Case, BaseException] | None, bool]:
    """One failure of BATCH examples, shrunk, or none; and whether the GPU can no longer be used."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import seed as seeded

    first = True
    last: tuple[Case, BaseException] | None = None

    def example(case: Case) -> None:
        nonlocal first, last
        # Past the time what is left of a batch passes unseen; a failure is still shrunk.
        if time.monotonic() > deadline and last is None and not first:
            return
        first = False
        try:
            test(case)
        except (Exception, GpuLost) as error:
            cause = error.__cause__ if isinstance(error, GpuLost) else None
            last = case, cause or error
            raise

    options = settings(
        max_examples=BATCH, deadline=None, database=None, print_blob=False,
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    try:
        seeded(seed)(options(given(strategy)(example)))()
    except GpuLost:
        return last, True
    except Exception:
        # Raised by the smallest example, which ran last, or by hypothesis because that one does not
        # fail every time: then it is worth showing all the more.
        if last is None:
            raise
    return last, False


def _report(case: Case, error: BaseException, found: Findings, bar: Bar, where: str) -> None:
    call = f"check({case!r}, device={where!r})"
    if call in found.failures:
        return
    lines = str(error).strip().splitlines() or [""]
    found.failures[call] = what = f"{type(error).__name__}: {lines[0]}"
    bar.line(f"\nFAILURE {len(found.failures)}: {what}")
    bar.line(f"import torch\nfrom tritonattn.testing import Case, check\n{call}\n")


def _has(device: Device, dtype: torch.dtype) -> bool:
    return device.has_bf16 or dtype != torch.bfloat16


def _is_alive() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
