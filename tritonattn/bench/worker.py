"""The process that uses the GPU, apart from the one that keeps the report.

A peer may break the GPU's context, crash, or never return, and no process gets out of that: it is
replaced, and only the one to blame has no figure.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import torch

from . import peers
from .cases import Case
from .gpu import Facts, GpuClock, LostError, current_device, ensure_alive, facts, free_memory
from .report import FAILED, OWN, SKIPPED, Result, Row
from .roofline import Ceilings, measure_ceilings
from .session import run_case
from .timing import Clock, Effort

TIME_LIMIT = 900.0  # seconds of one case: a peer may have to compile first
MOST_LOSSES = 3  # of processes that a peer may cost, before it is left out
NOBODY = -1


class Machine(NamedTuple):
    """What a run needs of a machine."""

    device: torch.device
    clock: Clock
    card: Facts
    ceilings: Callable[[], Ceilings]


def this_machine() -> Machine:
    device = current_device()
    clock, card = GpuClock(device), facts(device)
    return Machine(device, clock, card, lambda: measure_ceilings(clock, device, card))


@dataclass(frozen=True)
class Setup:
    machine: Callable[[], Machine]  # a module's: another process calls it
    peers: tuple[str, ...]
    effort: Effort | None  # None: check only


class Hello(NamedTuple):
    card: Facts
    loaded: list[str]  # of the peers
    notes: dict[str, str]  # of each peer


class Server:
    """What is asked of the process; ``at`` is told whose turn it is."""

    def __init__(self, setup: Setup, at: Callable[[str], None] = lambda _: None) -> None:
        self.setup, self.at = setup, at
        self.machine = setup.machine()
        self.modules, notes = peers.load(setup.peers)
        self.hello = Hello(self.machine.card, list(self.modules), notes)

    def compile_ahead(self, cases: Sequence[Case]) -> dict[str, str]:
        """Of each peer that compiles: what came of it."""
        notes: dict[str, str] = {}
        for name, module in self.modules.items():
            if hasattr(module, "compile_ahead"):
                print(f"{name}: compiling what is not yet compiled, may take minutes", flush=True)
                start = time.perf_counter()
                try:
                    done = module.compile_ahead(cases, self.machine.device)
                    print(f"{name}: {done}, {time.perf_counter() - start:.0f} s", flush=True)
                except Exception as error:
                    notes[name] = f"not compiled ahead: {peers.one_line(error)}"
        return notes

    def ceilings(self) -> Ceilings:
        return self.machine.ceilings()

    def row(self, case: Case, without: Sequence[str]) -> Row:
        """Raises LostError where the process has to be replaced."""
        machine, effort = self.machine, self.setup.effort
        clock = None if effort is None else machine.clock
        modules = {name: module for name, module in self.modules.items() if name not in without}
        try:
            return run_case(
                case, machine.device, modules, machine.card.l2, clock, effort or Effort(), self.at
            )
        except LostError:
            raise
        except Exception as error:  # a fault of the bench: the other cases may have none
            ensure_alive(machine.device)
            traceback.print_exc()
            return _failed(case, peers.one_line(error))

    def clean(self) -> None:
        ensure_alive(self.machine.device)
        try:
            free_memory()
        except RuntimeError as error:  # what was broken in the meantime, by what was freed
            raise LostError(peers.one_line(error)) from error


class Asked(Protocol):
    """A Server, wherever it runs."""

    hello: Hello
    ended: str  # why it can be asked nothing more

    def ask(self, what: str, *arguments: Any) -> Any:
        """What the Server's method gives; LostError if it was lost."""
        ...

    def close(self) -> None: ...


class Worker:
    """A Server in a process of its own."""

    def __init__(self, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self.ended = ""
        self._pipe, theirs = context.Pipe()
        # Beside the pipe, as a process that crashes says nothing any more.
        self._turn = context.Value("i", NOBODY, lock=False)
        self._process = context.Process(
            target=_serve, args=(setup, theirs, self._turn), daemon=True
        )
        self._process.start()
        theirs.close()
        self._names: list[str] = []
        try:
            self.hello: Hello = self._receive()
        except LostError:
            self.close()
            raise
        self._names = [OWN, *self.hello.loaded]

    def ask(self, what: str, *arguments: Any) -> Any:
        try:
            self._pipe.send((what, arguments))
        except OSError as error:
            self.ended = f"the process is gone: {error}"
            raise LostError(self.ended) from error
        answer = self._receive(None if what == "compile_ahead" else TIME_LIMIT)
        try:
            self._receive()  # after it has cleaned up
        except LostError as error:
            self.ended = str(error)
        return answer

    def close(self) -> None:
        self._process.terminate()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def _receive(self, limit: float | None = TIME_LIMIT) -> Any:
        culprit, text = "", ""
        try:
            if self._pipe.poll(limit):
                answer = self._pipe.recv()
                if not isinstance(answer, LostError):
                    return answer
                text, culprit = str(answer), answer.culprit
            else:
                text = f"no answer within {limit:g} seconds"
        except (EOFError, OSError):
            self._process.join(5)
            text = f"the process ended{_how(self._process.exitcode)}"
        turn: int = self._turn.value
        if not culprit and 0 <= turn < len(self._names):
            culprit = self._names[turn]
        self.ended = text
        raise LostError(text, culprit)


def _how(code: int | None) -> str:
    if code is None:
        return ""
    if code >= 0:
        return f" with exit code {code}"
    return f" by {signal.Signals(-code).name}"


def _serve(setup: Setup, pipe: Connection, turn: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    names: list[str] = []

    def at(name: str) -> None:
        turn.value = names.index(name) if name in names else NOBODY

    server = Server(setup, at)
    names += [OWN, *server.hello.loaded]
    pipe.send(server.hello)
    while True:
        try:
            what, arguments = pipe.recv()
        except EOFError:  # the parent is gone
            return
        try:
            pipe.send(getattr(server, what)(*arguments))
            at("")
            server.clean()
        except LostError as error:
            pipe.send(error)
            return
        except Exception as error:
            traceback.print_exc()
            pipe.send(LostError(peers.one_line(error)))
            return
        pipe.send(None)


class Runs:
    """Rows of cases, whatever becomes of the processes that measure them."""

    def __init__(self, start: Callable[[], Asked]) -> None:
        self._start = start
        self._worker: Asked | None = None
        self.hello = self._ready().hello
        self.replaced: list[str] = []  # why, of each process
        self._losses = Counter[str]()

    def ask(self, what: str, *arguments: Any) -> Any:
        """None where the process was lost; LostError as in ``row``."""
        self._ready()
        about = what.replace("_", " ")
        try:
            return self._ask(what, about, *arguments)
        except LostError as error:
            self.replaced.append(f"{about}: {error}")
            return None

    def row(self, case: Case) -> Row:
        """Raises LostError only where no process can be started any more."""
        left_out = f"broke the GPU or its process in {MOST_LOSSES} cases before"
        without = {
            name: Result(SKIPPED, left_out)
            for name, count in self._losses.items()
            if count >= MOST_LOSSES
        }
        while True:
            self._ready()
            try:
                row: Row = self._ask("row", case.name, case, [*without])
                break
            except LostError as error:
                others = [name for name in self.hello.loaded if name not in without]
                blamed = [error.culprit] if error.culprit else others
                self.replaced.append(f"{case.name}, {' or '.join(blamed) or OWN}: {error}")
                if OWN in blamed or not blamed:
                    row = _failed(case, str(error))
                    break
                without |= {name: Result(FAILED, str(error)) for name in blamed}
                self._losses.update(blamed)
        row.results |= without
        return row

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _ready(self) -> Asked:
        if self._worker is None:
            self._worker = self._start()
        return self._worker

    def _ask(self, what: str, about: str, *arguments: Any) -> Any:
        worker = self._ready()
        try:
            answer = worker.ask(what, *arguments)
        finally:
            if worker.ended:
                self.close()
        if worker.ended:
            self.replaced.append(f"after {about}: {worker.ended}")
        return answer


def _failed(case: Case, why: str) -> Row:
    row = Row.of(case)
    row.results[OWN] = Result(FAILED, why)
    return row
