"""Other libraries' attention, each behind the same small door.

A peer's module has ``load()``, which imports the library and gives its version, and
``prepare(case, calls)``, which gives one callable for each call; whatever need not be done again
for each call (plans, contiguous copies of cached keys) is done there.  Both raise what they like:
``Unsupported`` for a case that the library has no way to compute, anything else for a fault.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from types import ModuleType

from ..cases import Case

MODULES = {
    "cudnn": "cudnn",
    "fa2": "fa2",
    "varlen": "varlen",
    "fa3": "fa3",
    "flashinfer": "with_flashinfer",
    "vllm": "with_vllm",
}


class Unsupported(Exception):
    """The library has no such option, or not in the adapter's way of calling it."""


def require(case: Case, *features: str) -> None:
    """Raise Unsupported unless the case needs nothing but these of ``Case.features``."""
    missing = sorted(case.features - set(features))
    if missing:
        raise Unsupported("has no way to do: " + ", ".join(missing))


def chosen(names: Iterable[str] | None) -> list[str]:
    """The peers asked for, all by default; ValueError for a name that is none."""
    if names is None:
        return list(MODULES)
    wanted = [name.strip() for name in names if name.strip() not in ("", "none")]
    for name in wanted:
        if name not in MODULES:
            raise ValueError(f"no peer is called {name!r}: there are {', '.join(MODULES)}, or none")
    return wanted


def load(names: Sequence[str]) -> tuple[dict[str, ModuleType], dict[str, str]]:
    """The peers that import, and of each a version or why it does not."""
    found: dict[str, ModuleType] = {}
    notes: dict[str, str] = {}
    for name in names:
        try:
            module = importlib.import_module(f".{MODULES[name]}", __name__)
            notes[name] = module.load()
            found[name] = module
        except Exception as error:
            notes[name] = f"not here: {one_line(error)}"
    return found, notes


def one_line(error: BaseException, width: int = 140) -> str:
    """An exception in at most ``width`` characters."""
    text = " ".join(str(error).split()) or "no message"
    text = text if isinstance(error, Unsupported) else f"{type(error).__name__}: {text}"
    return text if len(text) <= width else text[: width - 3] + "..."
