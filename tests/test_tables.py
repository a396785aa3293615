"""Tuned tables: what they are keyed by, how they are found, and that no file can break a call."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tritonattn import device as devices
from tritonattn import settings
from tritonattn.api import paged_attention
from tritonattn.device import Device
from tritonattn.tuning import source, store, tables
from tritonattn.tuning.build import build
from tritonattn.tuning.config import KernelConfig
from tritonattn.tuning.heuristics import heuristic
from tritonattn.tuning.keys import FAMILIES, Key, key_of
from tritonattn.tuning.models import PRESETS, Layer
from tritonattn.tuning.tables import Entry, Table, TableError, TableWarning
from tritonattn.tuning.tasks import Shape, Task

H200 = devices.target(90, name="NVIDIA H200", sm_count=132)
LLAMA = PRESETS["llama3-8b"][0]
TASK = Task(LLAMA, "decode", Shape(32, 1, 8192))
PROBLEM, KEY = TASK.problem, TASK.key
DEFAULT = heuristic(PROBLEM, H200)
OTHER = KernelConfig(16, 32, 4, 2, 5)
THIRD = KernelConfig(16, 128, 4, 4, 2)


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Empty folders for the user's and the shipped tables, and nothing remembered."""
    user, shipped = tmp_path / "user", tmp_path / "package" / "autotune_cache"
    shipped.mkdir(parents=True)
    monkeypatch.setattr(settings, "CACHE_DIR", str(user))
    monkeypatch.setattr(store, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(store, "_unsaved", {})
    monkeypatch.setattr(tables, "_said", set())
    store.forget()
    yield user, shipped
    store.forget()


def entry(config: KernelConfig | None = OTHER, **changes: Any) -> Entry:
    known = Entry(config, 10.0, 12.5, DEFAULT, 11.0, "2026-01-02", source.source_hash(), "3.6.0")
    return dataclasses.replace(known, **changes)


def write(
    root: Path, config: KernelConfig | None = OTHER, gpu: Device = H200, **changes: Any
) -> Path:
    key = changes.pop("key", KEY)
    return tables.merge(root, gpu, key.family, {key: entry(config, **changes)})


# Files


def test_table_is_read_as_it_is_written_and_reads_well(places) -> None:
    path = write(places[0])
    write(places[0], THIRD, key=KEY._replace(k=16), runner_up=None, runner_up_us=None)
    table = tables.read(path)
    assert table is not None
    assert table.gpu == H200
    assert table.dropped == 0
    assert table.entries == {
        KEY: entry(),
        KEY._replace(k=16): entry(THIRD, runner_up=None, runner_up_us=None),
    }
    text = path.read_text()
    assert tables.render(table) == text
    assert max(map(len, text.splitlines())) <= 140
    write(places[0], us=9.0)  # a new time changes one line
    lines, changed = text.splitlines(), path.read_text().splitlines()
    assert sum(a != b for a, b in zip(lines, changed, strict=True)) == 1
    assert path.relative_to(places[0]) == Path("NVIDIA_H200/decode.json")


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("NVIDIA H200", "NVIDIA_H200"), ("../../etc/passwd", "etc_passwd"),
        ("a/b\\c:d*", "a_b_c_d"), ("..", "unnamed"), ("", "unnamed"), ("Tesla\0T4\n", "Tesla_T4"),
        ("x" * 300, "x" * 80),
        ("AMD Instinct™ MI300X", "AMD_Instinct_MI300X"),
    ],
)  # fmt: skip
def test_gpu_names_are_made_safe(name: str, folder: str, tmp_path: Path) -> None:
    assert tables.folder_name(name) == folder
    assert tables.path_of(tmp_path, name, "decode").resolve().parent.parent == tmp_path.resolve()


def _spoil(change: Callable[[dict[str, Any]], None]) -> Callable[[str], bytes]:
    def spoil(text: str) -> bytes:
        document = json.loads(text)
        change(document)
        return json.dumps(document).encode()

    return spoil


FILES: dict[str, Callable[[str], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda text: text[: len(text) // 2].encode(),
    "not UTF-8": lambda text: text.replace("NVIDIA", "\xc3").encode("latin-1"),
    "binary": lambda _: bytes(range(256)),
    "a list": lambda _: b"[]",
    "a number": lambda _: b"7",
    "deep": lambda _: b"[" * 200_000,
    "newer schema": _spoil(lambda d: d.update(schema=99)),
    "schema of a wrong type": _spoil(lambda d: d.update(schema=True)),
    "no schema": _spoil(lambda d: d.pop("schema")),
    "no entries": _spoil(lambda d: d.pop("entries")),
    "another kernel": _spoil(lambda d: d.update(kernel="../x")),
    "no GPU": _spoil(lambda d: d.pop("gpu")),
    "a GPU of no multiprocessors": _spoil(lambda d: d["gpu"].update(sm_count=0)),
    "a GPU with a boolean": _spoil(lambda d: d["gpu"].update(warp_size=True)),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("where", ["user", "shipped"])
def test_file_that_is_no_table_is_a_miss_with_one_warning(places, kind: str, where: str) -> None:
    path = write(places[where == "shipped"])
    path.write_bytes(FILES[kind](path.read_text()))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for max_k in (8192, 5000, 300, 100_000):
            problem = dataclasses.replace(PROBLEM, max_k=max_k)
            assert store.find(problem, H200).origin == "heuristic"
    assert [w.category for w in said] == [TableWarning]
    assert str(path) in str(said[0].message)


def test_broken_user_table_leaves_the_shipped_one(places) -> None:
    write(places[0]).write_bytes(b"{")
    write(places[1], THIRD)
    with pytest.warns(TableWarning):
        assert store.find(PROBLEM, H200)[:2] == (THIRD, "tuned")


ENTRIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "not an object": lambda e: e.clear(),
    "a field too many": lambda e: e["config"].update(code="import os"),
    "a field too few": lambda e: e["config"].pop("pack"),
    "a float": lambda e: e["config"].update(pack=4.0),
    "a boolean": lambda e: e["config"].update(num_stages=True),
    "a huge number": lambda e: e["config"].update(num_stages=10**400),
    "no power of two": lambda e: e["config"].update(block_n=48),
    "too many warps": lambda e: e["config"].update(num_warps=64),
    "a negative pack": lambda e: e["config"].update(pack=-4),
    "no configuration": lambda e: e.pop("config"),
    "no time": lambda e: e.pop("us"),
    "a time of 0": lambda e: e.update(us=0),
    "a time that is a text": lambda e: e.update(us="fast"),
    "a time past floats": lambda e: e.update(us=10**400),
    "NaN": lambda e: e.update(us=float("nan")),
    "half a runner-up": lambda e: e.pop("runner_up_us"),
    "a runner-up that is a list": lambda e: e.update(runner_up=[1]),
}


@pytest.mark.parametrize("kind", ENTRIES)
def test_entry_that_is_not_valid_is_left_out_and_the_others_stay(places, kind: str) -> None:
    write(places[0], THIRD, key=KEY._replace(k=14))
    path = write(places[0])
    document = json.loads(path.read_text())
    ENTRIES[kind](document["entries"][str(KEY)])
    path.write_text(json.dumps(document))
    with pytest.warns(TableWarning, match="1 of 2 entries"):
        found = store.find(PROBLEM, H200)
    assert found[:2] == (THIRD, "nearest")


def test_entry_that_the_call_cannot_run_is_not_used(places) -> None:
    small = dataclasses.replace(H200, shared_memory=24_000)
    huge = KernelConfig(64, 128, 4, 8, 6)
    write(places[0], huge)
    found = store.find(PROBLEM, small)
    assert found.config != huge
    assert not store.invalid(found.config, PROBLEM, small)
    store.forget()
    tiny = dataclasses.replace(H200, shared_memory=16_000)
    assert store.find(PROBLEM, tiny).origin == "heuristic"


# Looking


def test_entry_of_other_kernels_is_a_guess_with_one_warning(places) -> None:
    write(places[0], source="0" * 12)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert store.find(PROBLEM, H200)[:2] == (OTHER, "tuned")
        store.find(dataclasses.replace(PROBLEM, max_k=5000), H200)
        store.forget()
        store.find(PROBLEM, H200)
    assert [w.category for w in said] == [TableWarning]
    assert "other kernels" in str(said[0].message)


def test_lookup_goes_from_the_bucket_to_the_nearest_to_a_sibling_to_the_heuristic(places) -> None:
    user, shipped = places
    assert store.find(PROBLEM, H200) == (DEFAULT, "heuristic", "", None, None)

    h100 = dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3")
    write(shipped, THIRD, gpu=h100)
    store.forget()
    found = store.find(PROBLEM, H200)
    assert found[:2] == (THIRD, "sibling")
    assert "H100" in found.table

    near = KEY._replace(k=KEY.k + 1)
    write(shipped, OTHER, key=near)
    store.forget()
    assert store.find(PROBLEM, H200)[:2] == (OTHER, "nearest")
    assert store.find(PROBLEM, H200).key == near

    write(shipped, THIRD)
    store.forget()
    assert store.find(PROBLEM, H200)[:2] == (THIRD, "tuned")
    write(user, OTHER)
    store.forget()
    found = store.find(PROBLEM, H200)
    assert found[:2] == (OTHER, "tuned")
    assert "user" in found.table
    assert store.lookup(PROBLEM, H200) == OTHER

    with store.force(THIRD):
        assert store.find(PROBLEM, H200)[:2] == (THIRD, "forced")
    assert store.lookup(PROBLEM, H200) == OTHER


def test_lookup_prefers_a_fresh_entry_over_a_stale_one_of_the_same_bucket(places) -> None:
    user, shipped = places
    write(user, OTHER, source="old")
    write(shipped, THIRD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.lookup(PROBLEM, H200) == THIRD


def test_lookup_takes_a_neighbour_only_where_all_as_near_gained_much(places) -> None:
    """An entry speaks for others the less, the less it gained and the further away it is."""
    less, more, two = (KEY._replace(k=KEY.k + step) for step in (-1, 1, 2))

    def found() -> tuple[KernelConfig, str]:
        store.forget()
        return store.find(PROBLEM, H200)[:2]

    write(places[0], OTHER, key=less, us=10.0, default_us=10.4)
    assert found() == (DEFAULT, "heuristic")
    write(places[0], OTHER, key=less, us=10.0, default_us=10.6)
    assert found() == (OTHER, "nearest")
    write(places[0], THIRD, key=more, us=10.0, default_us=12.0)
    assert found() == (THIRD, "nearest")  # it gained more
    write(places[0], THIRD, key=two, us=10.0, default_us=20.0)
    write(places[0], OTHER, key=less, us=10.0, default_us=10.4)
    assert found() == (DEFAULT, "heuristic")  # one as near did not gain, and others are further
    path = tables.path_of(places[0], H200.name, KEY.family)
    path.unlink()
    write(places[0], THIRD, key=two, us=10.0, default_us=10.9)
    assert found() == (DEFAULT, "heuristic")
    write(places[0], THIRD, key=two, us=10.0, default_us=11.1)
    assert found() == (THIRD, "nearest")
    write(places[0], THIRD, key=two, us=10.0, default_us=20.0, source="of other kernels")
    assert found() == (DEFAULT, "heuristic")


def test_entry_without_a_configuration_leaves_each_call_to_the_heuristic(places) -> None:
    """Also where the heuristic tells calls of one bucket apart, and against a neighbour's gain."""
    write(places[0], None, us=10.0, default_us=10.0)
    write(places[0], THIRD, key=KEY._replace(k=KEY.k + 1), us=10.0, default_us=30.0)
    found = store.find(PROBLEM, H200)
    assert found[:2] == (DEFAULT, "tuned")
    assert found.entry is not None
    assert store.tuned(KEY, H200) == found.entry
    shorter = dataclasses.replace(PROBLEM, max_k=PROBLEM.max_k - 1)
    assert key_of(shorter) == KEY
    assert store.lookup(shorter, H200) == heuristic(shorter, H200)


def test_lookup_serves_float16_with_what_was_measured_in_bfloat16(places) -> None:
    half = dataclasses.replace(
        PROBLEM, dtype=torch.float16, out_dtype=torch.float16, cache_dtype=torch.float16
    )
    write(places[0], THIRD, us=10.0, default_us=10.3)
    assert store.find(half, H200)[:2] == (THIRD, "nearest")
    write(places[0], OTHER, key=key_of(half))
    store.forget()
    assert store.find(half, H200)[:2] == (OTHER, "tuned")


def test_sibling_is_scaled_by_multiprocessors_and_shared_memory(places) -> None:
    """On a quarter of the multiprocessors a quarter of the rows fills the GPU as well."""
    small = Device("cuda", 90, "Small Hopper", 33, 80_000, 32)
    deep = KernelConfig(16, 128, 4, 4, 6)
    write(places[1], deep, key=KEY._replace(rows=KEY.rows + 2))
    found = store.find(PROBLEM, small)
    assert found.origin == "sibling"
    assert found.entry == entry(deep)
    assert found.config.num_stages < 6
    assert not store.invalid(found.config, PROBLEM, small)
    ampere = devices.target(80, name="A100")
    assert store.find(PROBLEM, ampere).origin == "heuristic"
    amd = devices.target("gfx942", name="NVIDIA H200")  # a name is not enough
    assert store.find(PROBLEM, amd).origin == "heuristic"


def test_pack_means_all_heads_that_fit_for_every_group_of_a_class(places) -> None:
    seven = dataclasses.replace(PROBLEM, num_kv_heads=4, group=7)
    write(places[0], KernelConfig(16, 64, 8, 4, 3), key=key_of(seven))
    assert store.lookup(seven, H200).pack == 7
    eight = dataclasses.replace(PROBLEM, num_kv_heads=4, group=8)
    assert store.lookup(eight, H200).pack == 8
    write(places[0], KernelConfig(16, 64, 1, 4, 3), key=key_of(seven))
    store.forget()
    assert store.lookup(eight, H200).pack == 1


def test_tables_are_read_once(places, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(places[0])
    reads: list[Path] = []
    read = tables.read
    monkeypatch.setattr(tables, "read", lambda path: (reads.append(path), read(path))[1])
    store.find(PROBLEM, H200)
    assert reads.count(path) == 1
    before = len(reads)
    path.write_text("broken after it was read")
    for max_k in (8192, 5000, 6000):
        assert store.find(dataclasses.replace(PROBLEM, max_k=max_k), H200).config == OTHER
    for max_k in (100, 1000, 100_000):  # other buckets of the same file
        store.find(dataclasses.replace(PROBLEM, max_k=max_k), H200)
    assert len(reads) == before


def test_call_reads_no_table_under_the_interpreter(places, device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("compiled kernels have tables")
    write(places[0], gpu=dataclasses.replace(H200, name=devices.INTERPRETER.name)).write_bytes(b"{")
    args, options = build(Task(Layer(2, 1, 16), "decode", Shape(1, 1, 8)), device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TableWarning)
        paged_attention(*args, **options)


# Writing


def test_record_where_nothing_can_be_written_serves_this_process_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(settings, "CACHE_DIR", str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert store.record(H200, {KEY: entry()}) == []
        assert store.record(H200, {KEY._replace(k=9): entry(THIRD)}) == []
    assert [w.category for w in said] == [TableWarning]
    assert "could not be saved" in str(said[0].message)
    assert store.find(PROBLEM, H200)[:2] == (OTHER, "tuned")
    assert store.lookup(dataclasses.replace(PROBLEM, max_k=512), H200) == THIRD


def test_record_is_seen_by_the_next_call(places) -> None:
    assert store.lookup(PROBLEM, H200) == DEFAULT
    assert store.record(H200, {KEY: entry()}) == [places[0] / "NVIDIA_H200" / "decode.json"]
    assert store.lookup(PROBLEM, H200) == OTHER


def test_merge_keeps_a_broken_file_aside_and_a_newer_one_as_it_is(places) -> None:
    path = write(places[0])
    path.write_bytes(b"{ half")
    with pytest.warns(TableWarning, match="moved to"):
        write(places[0], THIRD)
    assert path.with_name("decode.json.bad").read_bytes() == b"{ half"
    assert store.lookup(PROBLEM, H200) == THIRD

    newer = path.read_text().replace('"schema": 1', '"schema": 2')
    path.write_text(newer)
    with pytest.raises(TableError, match="schema 2"):
        write(places[0])
    assert path.read_text() == newer


def test_merge_refuses_the_file_of_another_gpu(places) -> None:
    write(places[0])
    with pytest.raises(TableError, match="NVIDIA H200"):
        write(places[0], gpu=dataclasses.replace(H200, name="NVIDIA*H200"))


def _keys(writer: int) -> list[Key]:
    return [KEY._replace(group=1 << writer, k=k) for k in range(12)]


def _write_many(root: Path, writer: int) -> None:
    for key in _keys(writer):
        tables.merge(root, H200, "decode", {key: entry()})


def _write_and_die(root: Path, writer: int) -> None:
    """Killed with the lock held and half of the new file written."""
    keys = _keys(writer)
    for key in keys[:6]:
        tables.merge(root, H200, "decode", {key: entry()})

    def die(_: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    tables.os.fsync = die  # type: ignore[assignment]
    tables.merge(root, H200, "decode", {keys[6]: entry()})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="wants fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_concurrent_writers_lose_nothing_though_one_is_killed(places) -> None:
    entry()  # the source is hashed before the processes part
    context = multiprocessing.get_context("fork")
    jobs = [_write_and_die if i == 3 else _write_many for i in range(8)]
    writers = [context.Process(target=job, args=(places[0], i)) for i, job in enumerate(jobs)]
    for writer in writers:
        writer.start()
    path = tables.path_of(places[0], H200.name, "decode")
    readable = 0
    while any(writer.is_alive() for writer in writers):
        readable += tables.read(path) is not None  # raises for a half-written file
    for writer in writers:
        writer.join(60)
    codes = [writer.exitcode for writer in writers]
    assert codes == [0, 0, 0, -signal.SIGKILL, 0, 0, 0, 0]
    assert readable
    table = tables.read(path)
    assert table is not None
    lasting = {key for i in range(8) for key in _keys(i)[: 6 if i == 3 else None]}
    assert set(table.entries) == lasting
    write(places[0])  # the lock is free, and what the dead one left is cleared away
    assert sorted(p.name for p in path.parent.iterdir()) == [".decode.json.lock", "decode.json"]


def test_shipped_tables_are_valid() -> None:
    root = Path(__file__).parent.parent / "autotune_cache"
    for path in root.rglob("*.json"):
        table = tables.read(path)
        assert table is not None
        assert not table.dropped
        assert path == tables.path_of(root, table.gpu.name, table.kernel)
        assert tables.render(table) == path.read_text()


def test_table_of_every_family_can_be_empty() -> None:
    for family in FAMILIES:
        table = Table(H200, family)
        assert tables.parse(tables.render(table).encode(), "here") == table


def test_force_refuses_what_cannot_run() -> None:
    with (
        store.force(KernelConfig(128, 128, 4, 4, 3)),
        pytest.raises(RuntimeError, match="registers"),
    ):
        store.lookup(PROBLEM, H200)
