"""Where a configuration comes from.

In this order: what ``force`` says; a bucket's own entry, the user's table before the one that
ships; the nearest bucket's, where it gained much; that of a related GPU, scaled; the heuristic.  An
entry that was measured with other kernels than these is a guess: it comes last in its own bucket
and says nothing about others.

A call never tunes.  Tables are read once in a process, and each bucket is looked for once.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from .. import settings
from ..device import Device
from ..errors import UnsupportedError
from ..problem import Problem
from .config import KernelConfig, invalid
from .heuristics import heuristic
from .keys import Key, distance, key_of
from .space import fit
from .tables import (
    Entry,
    Table,
    TableError,
    folder_name,
    load,
    merge,
    path_of,
    warn_once,
)

PACKAGE = Path(__file__).parent.parent
# Of the default's time over an entry's, for each bucket that it is away: small gains seldom survive
# a change of lengths, and the heuristic knows more of a call than its bucket.
NEAR_GAIN = 0.05
_MOST_GUESSES = 8
_MOST_CALLS = 4096


class Found(NamedTuple):
    """A configuration and how it was found."""

    config: KernelConfig
    origin: str  # "forced", "tuned", "nearest", "sibling" or "heuristic"
    table: str = ""  # which table, in words
    key: Key | None = None  # its bucket there
    entry: Entry | None = None


class _Guess(NamedTuple):
    entry: Entry
    origin: str
    table: str
    key: Key


_forced: ContextVar[KernelConfig | None] = ContextVar("forced", default=None)

# In each process; ``forget`` empties them.
_found: dict[tuple[Problem, Device], Found] = {}
_guesses: dict[tuple[Key, Device], tuple[_Guess, ...]] = {}
_tables: dict[Path, Table | None] = {}
# Entries that no file would take.
_unsaved: dict[tuple[Device, str], dict[Key, Entry]] = {}


@contextlib.contextmanager
def force(config: KernelConfig) -> Iterator[None]:
    """Run every attention call in the block with ``config``, or refuse it: for tests and tuning."""
    token = _forced.set(config)
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> KernelConfig | None:
    """The configuration that ``force`` asks for, if any."""
    return _forced.get()


def lookup(problem: Problem, device: Device) -> KernelConfig:
    return find(problem, device).config


def find(problem: Problem, device: Device) -> Found:
    """What ``lookup`` returns, and where it comes from."""
    config = _forced.get()
    if config is not None:
        reason = invalid(config, problem, device)
        if reason:
            raise UnsupportedError(
                f"{problem.function}: the forced configuration cannot run here: {reason}."
            )
        return Found(config, "forced")
    found = _found.get((problem, device))
    if found is None:
        found = _resolve(problem, device)
        if len(_found) >= _MOST_CALLS:
            _found.clear()
        _found[problem, device] = found
    return found


def _resolve(problem: Problem, device: Device) -> Found:
    if not device.is_interpreter:
        key = key_of(problem)
        guesses = _guesses.get((key, device))
        if guesses is None:
            guesses = _guesses[key, device] = _look(key, device)
        for entry, origin, table, where in guesses:
            if entry.config is None:
                return Found(heuristic(problem, device), origin, table, where, entry)
            config = fit(entry.config, problem, device)
            if config is not None:
                if entry.is_stale:
                    _warn_stale(table)
                return Found(config, origin, table, where, entry)
    return Found(heuristic(problem, device), "heuristic")


def tuned(key: Key, device: Device) -> Entry | None:
    """The entry of just this bucket, also a stale one: what the tuner starts from."""
    guesses = _look(key, device)
    return guesses[0].entry if guesses and guesses[0].origin == "tuned" else None


def record(device: Device, entries: Mapping[Key, Entry], root: Path | None = None) -> list[Path]:
    """Write entries to the user's tables, or those under ``root``; the files written.

    Where that fails they serve this process, with one warning.
    """
    paths = []
    for kernel in sorted({key.family for key in entries}):
        mine = {key: entry for key, entry in entries.items() if key.family == kernel}
        try:
            root = root or user_root()
            if root is None:
                raise OSError("there is no folder for the user's tables")
            paths.append(merge(root, device, kernel, mine))
        except (OSError, TableError) as error:
            _unsaved.setdefault((device, kernel), {}).update(mine)
            warn_once(
                f"unsaved {root} {kernel}",
                f"tuned configurations could not be saved ({error}). They serve this process "
                "alone; set TRITONATTN_CACHE_DIR to a folder that can be written.",
            )
    forget()
    return paths


def forget() -> None:
    """Read tables anew at the next call."""
    _found.clear()
    _guesses.clear()
    _tables.clear()
    # It keeps what it was told; importing it would bring Triton along.
    launch = sys.modules.get("tritonattn.launch")
    if launch is not None:
        launch.forget()


# Where tables lie


def user_root() -> Path | None:
    if settings.CACHE_DIR:
        return Path(settings.CACHE_DIR).expanduser()
    try:
        import platformdirs
    except ImportError as error:
        warn_once("platformdirs", f"the user's own tuned tables are not looked for: {error}.")
        return None
    return Path(platformdirs.user_cache_dir("tritonattn", appauthor=False)) / "autotune_cache"


def shipped_root() -> Path | None:
    """Beside the modules in an installed package, beside the package in a checkout."""
    inside, beside = PACKAGE / "autotune_cache", PACKAGE.parent / "autotune_cache"
    if inside.is_dir():
        return inside
    return beside if beside.is_dir() and (PACKAGE.parent / "pyproject.toml").is_file() else None


def roots() -> list[tuple[str, Path]]:
    """Those there are, in order of preference, with what a message calls a table there."""
    both = (("the user's", user_root()), ("the shipped", shipped_root()))
    return [(name, root) for name, root in both if root is not None]


# Looking


def _look(key: Key, device: Device) -> tuple[_Guess, ...]:
    """The best first."""
    own = []
    for rank, (name, table) in enumerate(_own_tables(key.family, device)):
        for where, entry in table.entries.items():
            far = distance(key, where)
            if far is not None:
                origin = "tuned" if where == key else "nearest"
                order = (where.dtype != key.dtype, entry.is_stale, rank, where)
                own.append(_Ranked(far, order, _Guess(entry, origin, name, where)))
    ranked = own or _siblings(key, device)
    return tuple(_plausible(ranked)[:_MOST_GUESSES])


class _Ranked(NamedTuple):
    far: int
    order: tuple  # among those as far
    guess: _Guess


def _plausible(ranked: list[_Ranked]) -> list[_Guess]:
    """Those of the bucket itself, then those of the nearest others if all of these gained much."""
    here = sorted((r for r in ranked if not r.far), key=lambda r: r.order)
    near = [r for r in ranked if r.far and not r.guess.entry.is_stale]
    far = min((r.far for r in near), default=0)
    near = [r for r in near if r.far == far]
    if any(r.guess.entry.gain < 1 + NEAR_GAIN * far for r in near):
        near = []
    # The greatest gain first, but for what comes last whatever it gained.
    near.sort(key=lambda r: (r.order[:-1], -r.guess.entry.gain))
    return [r.guess for r in (*here, *near)]


def _own_tables(kernel: str, device: Device) -> Iterator[tuple[str, Table]]:
    unsaved = _unsaved.get((device, kernel))
    if unsaved:
        yield "this process's table", Table(device, kernel, unsaved)
    for name, root in roots():
        table = _table(path_of(root, device.name, kernel))
        if table is not None and _same_gpu(table.gpu, device) and table.kernel == kernel:
            yield f"{name} table of {device.name}", table


def _siblings(key: Key, device: Device) -> list[_Ranked]:
    """From GPUs of the same generation.

    What suits so many rows on one GPU suits as many for each multiprocessor on another.
    """
    found: list[_Ranked] = []
    for rank, (name, root) in enumerate(roots()):
        for path in sorted(root.glob(f"*/{key.family}.json")):
            if path.parent.name == folder_name(device.name):
                continue
            table = _table(path)
            if table is None or table.kernel != key.family or not _related(table.gpu, device):
                continue
            shift = round(math.log2(table.gpu.sm_count / device.sm_count))
            wanted = key if key.invariant else key._replace(rows=max(0, key.rows + shift))
            for where, entry in table.entries.items():
                far = distance(wanted, where)
                if far is not None:
                    is_other = table.gpu.arch != device.arch
                    order = (is_other, where.dtype != key.dtype, entry.is_stale, rank, where)
                    title = f"{name} table of {table.gpu.name}"
                    found.append(_Ranked(far, order, _Guess(entry, "sibling", title, where)))
    # One of the same architecture, if there is any, before all others.
    best = [r for r in found if not r.order[0]]
    return best or found


def _same_gpu(one: Device, other: Device) -> bool:
    """A slice of a GPU has its tables: slices differ by their multiprocessors at most."""
    return (one.name, one.backend, one.arch) == (other.name, other.backend, other.arch)


def _related(one: Device, other: Device) -> bool:
    def generation(device: Device) -> object:
        return device.arch // 10 if isinstance(device.arch, int) else device.arch[:5]

    return one.backend == other.backend and generation(one) == generation(other)


def _table(path: Path) -> Table | None:
    if path not in _tables:
        _tables[path] = load(path)
    return _tables[path]


def _warn_stale(table: str) -> None:
    warn_once(
        f"stale {table}",
        f"entries of {table} were measured with other kernels than these, and serve as a first "
        "guess; `tritonattn autotune` measures anew.",
    )
