"""What tests of the tuner share: an H200 that is not here, empty tables, a clock that obeys."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import pytest

from tritonattn import device as devices
from tritonattn import settings
from tritonattn.tuning import space, store, tables
from tritonattn.tuning.compile import Report
from tritonattn.tuning.config import KernelConfig
from tritonattn.tuning.models import PRESETS
from tritonattn.tuning.tasks import Shape, Task

H200 = devices.target(90, name="NVIDIA H200", sm_count=132)
TASK = Task(PRESETS["llama3-8b"][0], "decode", Shape(32, 1, 8192))
CANDIDATES = space.candidates(TASK.problem, H200)
DEFAULT = CANDIDATES[0]
FINE = Report(shared=50_000, registers=128, spill_bytes=0)


@pytest.fixture(name="user")
def user_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the user's tables, empty; none are shipped, and nothing is remembered."""
    monkeypatch.setattr(settings, "CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(store, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(store, "_unsaved", {})
    monkeypatch.setattr(tables, "_said", set())
    store.forget()
    yield tmp_path / "user"
    store.forget()


@dataclasses.dataclass
class Fake:
    """A backend whose kernels take ``us`` and are what ``report`` and ``wrong`` say."""

    us: Callable[[KernelConfig], float | tuple[float, ...]] = lambda _: 10.0
    report: Callable[[KernelConfig], Report | str] = lambda _: FINE
    wrong: Callable[[KernelConfig], str] = lambda _: ""
    compiled: list[KernelConfig] = dataclasses.field(default_factory=list)
    checked: list[KernelConfig] = dataclasses.field(default_factory=list)
    timed: list[KernelConfig] = dataclasses.field(default_factory=list)
    foreseen: list[Task] = dataclasses.field(default_factory=list)
    is_open: bool = False
    was_closed: bool = False

    def foresee(self, task: Task, configs: Sequence[KernelConfig]) -> None:
        self.foreseen.append(task)

    def compile(
        self, task: Task, configs: Sequence[KernelConfig]
    ) -> Generator[tuple[KernelConfig, Report | str], None, None]:
        try:
            for config in random.Random(1).sample(configs, len(configs)):
                self.compiled.append(config)
                yield config, self.report(config)
        finally:
            self.was_closed = True

    @contextlib.contextmanager
    def session(self, task: Task) -> Iterator[Fake]:
        self.is_open = True
        try:
            yield self
        finally:
            self.is_open = False

    def check(self, config: KernelConfig) -> str:
        assert self.is_open
        self.checked.append(config)
        return self.wrong(config)

    def time(self, config: KernelConfig, replays: int = 1) -> tuple[float, ...]:
        assert self.is_open
        self.timed.append(config)
        us = self.us(config)
        return us if isinstance(us, tuple) else (us,)


def best_is(best: KernelConfig, us: float = 5.0) -> Callable[[KernelConfig], float]:
    return lambda config: us if config == best else 10.0


def wall_timer(run: Callable[[int], None], copies: int) -> Callable[[int], float]:
    """A trials.Timer for the interpreter."""

    def sample(replays: int) -> float:
        start = time.perf_counter()
        for i in range(copies * replays):
            run(i)
        return (time.perf_counter() - start) * 1e6 / (copies * replays)

    return sample
