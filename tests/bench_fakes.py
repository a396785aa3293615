"""A clock that obeys, and a card that does not exist, for tests of the bench."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from tritonattn.bench import peers, session
from tritonattn.bench.cases import Case
from tritonattn.bench.gpu import Facts, LostError
from tritonattn.bench.roofline import Ceilings
from tritonattn.bench.timing import Effort
from tritonattn.bench.worker import Machine
from tritonattn.call import Call
from tritonattn.device import interpreting

SHORT = Effort(rounds=3, round_us=400.0, sample_us=100.0, host_loops=2, host_calls=4)


class FakeClock:
    """Time passes when a fake call is made, on the host and the device alike."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def call(self, name: str, us: float, *, in_graph: bool = True, dies: int = 1 << 30) -> Any:
        left = [dies]

        def run(capturing: bool = False) -> None:
            if capturing and not in_graph:
                raise RuntimeError("not in a graph")
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("died")
            self.now += us
            self.log.append(name)

        return run

    def capture(self, calls: Sequence[Any]) -> Any:
        for call in calls:
            call(True) if call.__name__ == "run" else call()
        return lambda: [call() for call in calls]

    def device_time(self, run: Callable[[], Any], times: int) -> list[float]:
        result = []
        for _ in range(times):
            start = self.now
            run()
            result.append(self.now - start or 500.0)  # a real call takes no fake time
        return result

    def host_time(self, calls: Sequence[Any]) -> tuple[float, float]:
        start = self.now
        for call in calls:
            call()
        return (self.now - start) / 2, self.now - start


CARD = Facts("A card", "sm_00", 1, 1 << 30, 1)
CEILINGS = Ceilings(4.0, 4.0, 700.0)
FAST = replace(SHORT, rounds=1, host_loops=1)


def machine() -> Machine:
    where = torch.device("cpu" if interpreting() else "cuda")
    return Machine(where, FakeClock(), CARD, lambda: CEILINGS)


def machine_with_peers() -> Machine:
    """Beside peers that raise, crash, or break the context: they exist in this process alone."""

    def raises() -> None:
        raise RuntimeError("no kernel for this")

    def crashes() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def breaks() -> None:
        def lost(device: torch.device) -> None:
            raise LostError("CUDA error: an illegal memory access was encountered")

        session.ensure_alive = lost  # type: ignore[attr-defined]
        raise RuntimeError("CUDA error")

    for name, does in (("raises", raises), ("crashes", crashes), ("breaks", breaks)):
        add_peer(name, does)
    return machine()


def add_peer(name: str, does: Callable[[], None]) -> None:
    module: Any = ModuleType(f"{peers.__name__}.{name}")
    module.load = lambda: "1.0"

    def prepare(case: Case, calls: Sequence[Call]) -> list[Callable[[], Any]]:
        return [does for _ in calls]

    module.prepare = prepare
    sys.modules[module.__name__] = module
    peers.MODULES[name] = name
