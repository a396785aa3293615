"""``tritonattn cache``: tuned tables, the user's and those that ship."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..console import columns, count
from ..errors import ArgumentValueError
from ..tuning import space, store
from ..tuning.keys import FAMILIES, Key
from ..tuning.tables import (
    MAX_BYTES,
    SCHEMA,
    Entry,
    Table,
    TableError,
    folder_name,
    merge,
    parse,
    read,
    render,
)

DESCRIPTION = """\
Tuned tables are JSON files, one a GPU and kernel: the user's, which `tritonattn autotune` writes,
come before those that ship with the package."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, what: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=what, description=what)

    for name, what in (
        ("list", "every table with what it holds"),
        ("show", "the entries of tables"),
        ("clear", "delete the user's tables"),
    ):
        chosen = action(name, what)
        chosen.add_argument("--gpu", help="its name or folder; default: all")
        chosen.add_argument("--kernel", choices=FAMILIES, help="default: all")
        if name == "clear":
            chosen.add_argument("--yes", action="store_true", help="do not ask")
        else:
            chosen.add_argument("--of", choices=("user", "shipped"), help="default: both")
    compared = action("diff", "what differs between two sets of tables")
    where = "user, shipped, a table, an export or a folder of tables"
    compared.add_argument("old", nargs="?", default="shipped", help=f"{where}; default: shipped")
    compared.add_argument("new", nargs="?", default="user", help="the same; default: user")
    exported = action("export", "all of the user's tables as one file")
    exported.add_argument("file", type=Path)
    exported.add_argument("--of", choices=("user", "shipped"), default="user")
    imported = action("import", "add a table or an export to the user's tables")
    imported.add_argument("file", type=Path)


def run(args: argparse.Namespace) -> int:
    return {
        "list": _list, "show": _show, "clear": _clear, "diff": _diff, "export": _export,
        "import": _import,
    }[args.action](args)  # fmt: skip


def _list(args: argparse.Namespace) -> int:
    rows: list[Sequence[object]] = [("of", "GPU", "kernel", "entries", "stale", "latest", "file")]
    bad = 0
    for name, path in _files(args):
        try:
            table = read(path)
        except (TableError, OSError) as error:
            print(f"cannot be used: {error}", file=sys.stderr)
            bad += 1
            continue
        if table is not None:
            stale = sum(entry.is_stale for entry in table.entries.values())
            latest = max((entry.date for entry in table.entries.values()), default="")
            row = (name, table.gpu.name, table.kernel, len(table.entries), stale, latest, path)
            rows.append(row)
    if len(rows) > 1:
        print(columns(rows))
    else:
        print(
            "There are no tuned tables; `tritonattn autotune` makes some on a machine with a GPU."
        )
    for name, root in _roots():
        print(f"{name}: {root}")
    return 1 if bad else 0


def _show(args: argparse.Namespace) -> int:
    shown = 0
    for name, path in _files(args):
        table = read(path)
        if table is None:
            continue
        print(f"{table.gpu.name}, {table.kernel} ({name})")
        rows: list[Sequence[object]] = [("bucket", "µs", "speed-up", "configuration", "measured")]
        for key, entry in sorted(table.entries.items()):
            made = f"{entry.date}, triton {entry.triton}" + ", other kernels" * entry.is_stale
            gain = f"{entry.default_us / entry.us:.2f}x"
            rows.append((key, f"{entry.us:.1f}", gain, _described(entry), made))
        print(columns(rows, "  "))
        shown += 1
    if not shown:
        print("There is no such table; `tritonattn cache list` lists those that there are.")
    return 0 if shown else 1


def _described(entry: Entry) -> str:
    return "the heuristic's" if entry.config is None else space.describe(entry.config)


def _clear(args: argparse.Namespace) -> int:
    args.of = "user"
    paths = [path for _, path in _files(args)]
    if not paths:
        print("There is nothing to delete.")
        return 0
    print("\n".join(map(str, paths)))
    if not args.yes:
        if not sys.stdin.isatty():
            print("Give --yes to delete these.", file=sys.stderr)
            return 2
        if input(f"Delete {count(len(paths), 'table')}? [y/N] ").strip().lower() not in (
            "y",
            "yes",
        ):
            return 1
    for path in paths:
        path.unlink(missing_ok=True)
    store.forget()
    print(f"deleted: {count(len(paths), 'table')}")
    return 0


def _diff(args: argparse.Namespace) -> int:
    old, new = _entries(args.old), _entries(args.new)
    for name, entries in ((args.old, old), (args.new, new)):
        if not entries:
            print(f"There is nothing to compare: {name} has no tables.")
            return 1
    rows: list[Sequence[object]] = [("", "GPU", "kernel", "bucket", "µs", "configuration")]

    def describe(entry: Entry) -> tuple[str, str]:
        return f"{entry.us:.1f}", _described(entry)

    same = 0
    for place in sorted(old.keys() | new.keys()):
        gpu, key = place
        before, after = old.get(place), new.get(place)
        if before is not None and after is not None and before.config == after.config:
            same += 1
            continue
        for sign, entry in (("-", before), ("+", after)):
            if entry is not None:
                rows.append((sign, gpu, key.family, key, *describe(entry)))
    if len(rows) > 1:
        print(columns(rows))
    print(f"{count(same, 'bucket')} with the same configuration in both")
    return 0


def _export(args: argparse.Namespace) -> int:
    tables = [json.loads(render(table)) for table in _tables(args.of)]
    document = {"schema": SCHEMA, "tables": tables}
    args.file.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"written: {args.file}, {count(len(tables), 'table')}")
    return 0


def _import(args: argparse.Namespace) -> int:
    root = store.user_root()
    if root is None:
        raise ArgumentValueError(
            "there is no folder for the user's tables: set TRITONATTN_CACHE_DIR"
        )
    for table in _bundle(args.file):
        path = merge(root, table.gpu, table.kernel, table.entries)
        dropped = f", {table.dropped} not valid and left out" if table.dropped else ""
        print(f"{table.gpu.name}, {table.kernel}: {len(table.entries)} entries{dropped}; {path}")
    store.forget()
    return 0


# Where tables come from


def _roots() -> list[tuple[str, Path]]:
    roots = (("user", store.user_root()), ("shipped", store.shipped_root()))
    return [(name, root) for name, root in roots if root is not None]


def _files(args: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    for name, root in _roots():
        if args.of in (None, name):
            for path in sorted(root.glob("*/*.json")):
                is_gpu = args.gpu is None or folder_name(args.gpu) == path.parent.name
                if is_gpu and path.stem in FAMILIES and args.kernel in (None, path.stem):
                    yield name, path


def _tables(which: str) -> list[Table]:
    """``which``: user, shipped, a table, an export or a folder of tables."""
    root = dict(_roots()).get(which) if which in ("user", "shipped") else Path(which)
    if root is None or not root.exists():
        if which in ("user", "shipped"):
            return []
        raise ArgumentValueError(f"there is no {which}")
    if root.is_file():
        return _bundle(root)
    paths = (path for path in sorted(root.glob("*/*.json")) if path.stem in FAMILIES)
    return [table for table in map(read, paths) if table is not None]


def _entries(which: str) -> dict[tuple[str, Key], Entry]:
    return {
        (table.gpu.name, key): entry
        for table in _tables(which)
        for key, entry in table.entries.items()
    }


def _bundle(path: Path) -> list[Table]:
    """The tables of an export, or the one that the file is."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise TableError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise TableError(f"{path} is larger than {MAX_BYTES >> 20} MiB")
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TableError(f"{path} is not JSON ({error})") from error
    tables = document.get("tables") if isinstance(document, dict) else None
    if not isinstance(tables, list):
        return [parse(data, str(path))]
    return [
        parse(json.dumps(table).encode(), f"table {i} of {path}") for i, table in enumerate(tables)
    ]
