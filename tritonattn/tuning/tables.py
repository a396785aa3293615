"""Tuned tables: one JSON file a GPU and kernel family, read with suspicion, written without loss.

    autotune_cache/NVIDIA_H200/decode.json

A file is data: whatever it holds, reading it runs nothing, and an entry that is not a bucket, a
configuration and times is left out.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..device import Device
from ..errors import TritonAttnError
from .config import KernelConfig, out_of_range
from .keys import FAMILIES, Key
from .source import source_hash

SCHEMA = 1
MAX_BYTES = 16 << 20
LOCK_TIMEOUT = 20.0  # seconds; a write takes milliseconds


class TableError(TritonAttnError, ValueError):
    """A file that is not a table of this version; the message names it."""


class VersionError(TableError):
    """A table of another version of this package, which is not to be written over."""


class TableWarning(UserWarning):
    """Something about tuned tables that no call fails for."""


@dataclass(frozen=True)
class Entry:
    """What one bucket's tuning found.  Times are microseconds a call."""

    config: KernelConfig | None  # None: the heuristic's choice, whatever it is for a call
    us: float
    default_us: float  # of the heuristic's choice
    runner_up: KernelConfig | None = None
    runner_up_us: float | None = None
    date: str = ""
    source: str = ""  # hash of the kernels' source
    triton: str = ""

    @property
    def gain(self) -> float:
        """The default's time over the entry's."""
        return 1.0 if self.config is None else self.default_us / self.us

    @property
    def is_stale(self) -> bool:
        """Measured with other kernels than these."""
        return self.source != source_hash()


@dataclass
class Table:
    gpu: Device
    kernel: str  # one of FAMILIES
    entries: dict[Key, Entry] = field(default_factory=dict)
    dropped: int = 0  # entries of the file that are not valid


def folder_name(gpu: str) -> str:
    """A GPU's name as a file name: ``NVIDIA_H200``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", gpu)[:80].strip("._-") or "unnamed"


def path_of(root: Path, gpu: str, kernel: str) -> Path:
    return root / folder_name(gpu) / f"{kernel}.json"


# Reading


def parse(data: bytes, where: str) -> Table:
    """Raises TableError; entries that are not valid are counted and left out."""
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TableError(f"{where} is not JSON ({type(error).__name__}: {error})") from error
    if not isinstance(document, dict) or type(document.get("schema")) is not int:
        raise TableError(f"{where} is not a table of tuned configurations")
    if document["schema"] != SCHEMA:
        raise VersionError(
            f"{where} has schema {document['schema']}, and this tritonattn reads {SCHEMA}"
        )
    kernel, entries = document.get("kernel"), document.get("entries")
    if kernel not in FAMILIES or not isinstance(entries, dict):
        raise TableError(f"{where} names no kernel family or holds no entries")
    table = Table(_device(document.get("gpu"), where), kernel)
    for text, entry in entries.items():
        try:
            table.entries[Key.parse(kernel, text)] = _entry(entry)
        except (ValueError, TypeError, OverflowError, RecursionError):
            table.dropped += 1
    return table


def read(path: Path) -> Table | None:
    """None if there is no such file; raises TableError or OSError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(data) > MAX_BYTES:
        raise TableError(f"{path} is larger than a table may be ({MAX_BYTES >> 20} MiB)")
    return parse(data, str(path))


def load(path: Path) -> Table | None:
    """As ``read``, with one warning in place of an error."""
    try:
        table = read(path)
    except (TableError, OSError) as error:
        warn_once(str(path), f"{error}; it is not used.")
        return None
    if table is not None and table.dropped:
        what = f"{table.dropped} of {table.dropped + len(table.entries)} entries"
        warn_once(str(path), f"{what} of {path} are not valid and are not used.")
    return table


def _device(facts: object, where: str) -> Device:
    kinds = {field.name: field.type for field in fields(Device)}
    if not isinstance(facts, dict) or set(facts) != set(kinds):
        raise TableError(f"{where} does not say which GPU it is for")
    for name, kind in kinds.items():
        value = facts[name]
        is_right = value != "" if isinstance(value, str) else type(value) is int and value > 0
        if not is_right or type(value).__name__ not in str(kind):
            raise TableError(f"{where} does not say which GPU it is for: {name} is wrong")
    return Device(**facts)


def _entry(data: object) -> Entry:
    if not isinstance(data, dict):
        raise ValueError("an entry is an object")
    has_second = data.get("runner_up") is not None
    measured = data["measured"] if isinstance(data.get("measured"), dict) else {}
    return Entry(
        None if data.get("config", ()) is None else _config(data.get("config")),
        _time(data.get("us")),
        _time(data.get("default_us")),
        _config(data["runner_up"]) if has_second else None,
        _time(data.get("runner_up_us")) if has_second else None,
        *(str(measured.get(name, ""))[:40] for name in ("date", "source", "triton")),
    )


def _config(data: object) -> KernelConfig:
    config = KernelConfig.from_json(json.dumps(data))
    if reason := out_of_range(config):
        raise ValueError(reason)
    return config


def _time(value: object) -> float:
    if type(value) not in (int, float) or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
        raise ValueError(f"a time is a number above 0; got {value!r}")
    return float(value)  # type: ignore[arg-type]


# Writing


def render(table: Table) -> str:
    """The file's text: a fact a line and the same order every time, so that changes read well."""
    entries = []
    for key, entry in sorted(table.entries.items()):
        config = None if entry.config is None else asdict(entry.config)
        lines = [f'"config": {_one_line(config)}']
        times = {"us": entry.us, "default_us": entry.default_us}
        if entry.runner_up is not None and entry.runner_up_us is not None:
            lines.append(f'"runner_up": {_one_line(asdict(entry.runner_up))}')
            times["runner_up_us"] = entry.runner_up_us
        lines.append(", ".join(f'"{name}": {us:.6g}' for name, us in times.items()))
        facts = {"date": entry.date, "source": entry.source, "triton": entry.triton}
        lines.append(f'"measured": {_one_line(facts)}')
        body = ",\n      ".join(lines)
        entries.append(f"    {json.dumps(str(key))}: {{\n      {body}\n    }}")
    head = {"schema": SCHEMA, "gpu": asdict(table.gpu), "kernel": table.kernel}
    parts = [f"  {json.dumps(name)}: {_one_line(value)}" for name, value in head.items()]
    inside = ",\n".join(entries)
    parts.append('  "entries": {' + (f"\n{inside}\n  " if entries else "") + "}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def merge(root: Path, gpu: Device, kernel: str, entries: Mapping[Key, Entry]) -> Path:
    """Add entries to a file, in place of those of the same buckets; other writers' stay.

    Raises OSError where the folder cannot be written, TableError rather than replace a file of
    another version.
    """
    from filelock import FileLock

    path = path_of(root, gpu.name, kernel)
    path.parent.mkdir(parents=True, exist_ok=True)
    # filelock's Timeout is an OSError.
    with FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_TIMEOUT):
        for leftover in path.parent.glob(f".{path.name}.*.tmp"):
            leftover.unlink(missing_ok=True)  # of a writer that died, as the lock is ours
        table = _table_to_extend(path, gpu, kernel)
        table.entries.update(entries)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(render(table))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    return path


def _table_to_extend(path: Path, gpu: Device, kernel: str) -> Table:
    try:
        table = read(path)
    except VersionError:
        raise
    except TableError as error:
        kept = path.with_name(path.name + ".bad")
        os.replace(path, kept)
        warn_once(f"{path} kept", f"{error}; it was moved to {kept} and a new one begun.")
        return Table(gpu, kernel)
    if table is None:
        return Table(gpu, kernel)
    if table.kernel != kernel or table.gpu.name != gpu.name:
        raise TableError(
            f"{path} is a table of {table.gpu.name}'s {table.kernel} kernel, not of {gpu.name}'s "
            f"{kernel}; it was left as it is"
        )
    return Table(gpu, kernel, table.entries)


def _one_line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


# Saying a thing once

_said: set[str] = set()


def warn_once(about: str, message: str) -> None:
    """One warning a subject in a process."""
    if about not in _said:
        _said.add(about)
        warnings.warn(f"tritonattn: {message}", TableWarning, stacklevel=3)
