"""Hopper's kernel where it can serve, whatever would be chosen: for tests that run it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import torch

from tritonattn import device as devices
from tritonattn import launch
from tritonattn.device import Device
from tritonattn.problem import Problem
from tritonattn.tuning import heuristics, store
from tritonattn.tuning.config import KernelConfig, invalid


def is_here() -> bool:
    """Whether there is a GPU that it runs on."""
    if devices.interpreting() or not torch.cuda.is_available():
        return False
    gpu = devices.describe(torch.device("cuda", torch.cuda.current_device()))
    return (gpu.backend, gpu.arch) == ("cuda", 90)


@contextlib.contextmanager
def preferred(**changes: object) -> Iterator[Counter[str]]:
    """Inside, calls that it can serve run it, with its default configuration but for ``changes``.

    Gives how many kinds of calls were given to each kernel.
    """
    counts: Counter[str] = Counter()

    def choose(problem: Problem, device: Device) -> KernelConfig:
        config = dataclasses.replace(heuristics.hopper(problem), **changes)  # type: ignore[arg-type]
        if invalid(config, problem, device):
            config = store.lookup(problem, device)
        counts[config.kernel] += 1
        return config

    launch.forget()
    try:
        with mock.patch.object(launch, "lookup", choose):
            yield counts
    finally:
        launch.forget()
