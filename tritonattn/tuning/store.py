"""Where a configuration comes from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from ..device import Device
from ..errors import UnsupportedError
from ..problem import Problem
from .config import KernelConfig, invalid
from .heuristics import heuristic

_forced: ContextVar[KernelConfig | None] = ContextVar("forced", default=None)


@contextlib.contextmanager
def force(config: KernelConfig) -> Iterator[None]:
    """Run every attention call in the block with ``config``, or refuse it: for tests and tuning."""
    token = _forced.set(config)
    try:
        yield
    finally:
        _forced.reset(token)


def lookup(problem: Problem, device: Device) -> KernelConfig:
    forced = _forced.get()
    if forced is None:
        return heuristic(problem, device)
    reason = invalid(forced, problem, device)
    if reason:
        raise UnsupportedError(
            f"{problem.function}: the forced configuration cannot run here: {reason}."
        )
    return forced
