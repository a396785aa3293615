"""Repeated launches with their arguments in a row: what Triton's launcher and the driver are given.

No GPU is needed: launchers are stood in for by classes that are called as Triton's are.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.nvidia import driver

from tritonattn import binaries
from tritonattn import device as devices
from tritonattn.boxes import Box
from tritonattn.repeat import Repeat, Repeatable

FUNCTION, PACKED = "the function", (4, 1, 1000)


class Numbers(NamedTuple):
    ptr: torch.Tensor
    stride: int
    nothing: None
    part: float


class Pair(NamedTuple):
    inner: Numbers
    nothing: None


class Spec(NamedTuple):
    WIDTH: int
    NAME: str


class Launcher:
    """As of Triton 3.6, which compiles the C function that it calls."""

    def __init__(self, src: Any, metadata: Any) -> None:
        assert src.constants == {}
        assert not metadata.tensordesc_meta  # a box's type would be looked for
        self.kinds = list(src.signature.values())
        self.given: list[tuple] = []
        self.launch = lambda *given: self.given.append(given)

    def __call__(self, x, y, z, stream, function, *args) -> None:
        self.launch(x, y, z, stream, function, False, False, None, None, *args)

    def launched(self) -> tuple[tuple, tuple]:
        """The last launch: grid, stream, function and metadata, then the kernel's arguments."""
        x, y, z, stream, function, _, _, _, _, packed, *hooks = self.given[-1]
        assert hooks[:3] == [None, None, None]
        return (x, y, z, stream, function, packed), tuple(hooks[3:])


class LaterLauncher(Launcher):
    """As of Triton 3.9, whose C function takes the kernel's arguments as one tuple."""

    def __call__(self, x, y, z, stream, function, packed, data, enter, leave, *args) -> None:
        hooks = packed, data, enter, leave
        self.launch(x, y, z, stream, function, False, False, *hooks, None, None, ["?"], b"?", args)

    def launched(self) -> tuple[tuple, tuple]:
        x, y, z, stream, function, _, _, packed, *hooks, _, _, notes, signature, args = self.given[
            -1
        ]
        assert (hooks, notes, signature) == ([None, None, None], ["?"], b"?")
        return (x, y, z, stream, function, packed), args


class Binary:
    function, packed_metadata = FUNCTION, PACKED

    def __init__(self, **metadata: Any) -> None:
        self.ordinary: list[tuple] = []
        usual = {
            "target": SimpleNamespace(backend="cuda"), "global_scratch_size": 0,
            "profile_scratch_size": 0, "tensordesc_meta": [],
        }  # fmt: skip
        names = {**usual, **metadata}
        self.metadata = NamedTuple("Metadata", [(name, Any) for name in names])(*names.values())

    def __getitem__(self, grid: tuple) -> Callable[..., None]:
        return lambda *args: self.ordinary.append(("hooked", *grid, args))

    def run(self, *given: Any) -> None:
        self.ordinary.append(given)


@pytest.fixture(params=[Launcher, LaterLauncher])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Launcher]:
    """The launchers that are made, as by an old and a new Triton; the current stream is 7."""
    launchers: list[Launcher] = []

    def make(src: Any, metadata: Any) -> Launcher:
        launchers.append(request.param(src, metadata))
        return launchers[-1]

    active = SimpleNamespace(launcher_cls=make)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(devices, "current", lambda: 0)
    monkeypatch.setattr(devices, "stream_of", lambda _: 7)
    return launchers


def arguments() -> tuple[tuple, list[torch.Tensor]]:
    tensors = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int32)]
    a, b = tensors
    return (a, None, Numbers(b, 30, None, 0.5), Pair(Numbers(a, 1, None, 1.0), None), 12), tensors


def repeat_of(binary: Binary, args: tuple) -> Repeat:
    types = binaries._signature(args)
    return Repeat(Repeatable(binary, 5, args, types, (Spec(1, "x"), 3), 0))


def test_repeat_gives_the_driver_its_parameters_in_a_row(made: list[Launcher]) -> None:
    args, (a, b) = arguments()
    repeated, binary = [], Binary()
    for _ in range(2):
        repeated.append(repeat_of(binary, args))
    assert repeated[1].addresses == [a.data_ptr(), b.data_ptr(), a.data_ptr()]
    assert len(made) == 1  # which Triton may have to compile: one for a binary
    assert made[0].given == []
    assert made[0].kinds == ["*bf16", "*i32", "i64", "fp32", "*bf16", "i64", "fp32", "i32"]
    for repeat in repeated:
        repeat(100, 200, 300)
        how, given = made[0].launched()
        assert how == (5, 1, 1, 7, FUNCTION, PACKED)
        assert given == (100, 200, 30, 0.5, 300, 1, 1.0, 12)
    assert binary.ordinary == []


def test_repeat_encodes_a_box_once_for_an_address(
    made: list[Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []

    def encode(box: Box, how: str) -> list:
        encoded.append((box.data_ptr(), box.shape, how))
        return [f"map of {box.data_ptr()}", *box.shape, *box.strides]

    for function in (encode, lambda box, how, _: encode(box, how)):  # the second of Triton 3.8 on
        monkeypatch.setattr(driver, "make_tensordesc_arg", function)
        box = Box(64, torch.bfloat16, (8, 4), (4, 1), (2, 4), None)
        repeat = repeat_of(Binary(tensordesc_meta=["so"]), (3, box))
        encoded.clear()
        for address in (80, 96, 80, 96):
            repeat(address)
            _, given = made[-1].launched()
            assert given == (3, f"map of {address}", 8, 4, 4, 1)
        assert encoded == [(80, (8, 4), "so"), (96, (8, 4), "so")]
        assert made[-1].kinds == ["i32", "nvTmaDesc", "i32", "i32", "i64", "i64"]


@pytest.mark.parametrize(
    "metadata",
    [
        {"global_scratch_size": 8},  # memory of its own at each launch
        {"profile_scratch_size": 8},
        {"instrumentation_mode": "gsan"},
        {"target": SimpleNamespace(backend="hip")},
    ],
    ids=str,
)
def test_repeat_leaves_other_binaries_to_their_own_launchers(
    metadata: dict[str, Any], made: list[Launcher]
) -> None:
    args, _ = arguments()
    binary = Binary(**metadata)
    repeat_of(binary, args)(100, 200, 300)
    nested = (100, None, (200, 30, None, 0.5), ((300, 1, None, 1.0), None), 12, Spec(1, "x"), 3)
    assert binary.ordinary == [(5, 1, 1, 7, FUNCTION, PACKED, None, None, None, *nested)]
    assert made == []


def test_repeat_leaves_boxes_that_no_copy_engine_takes_to_the_usual_launcher(
    made: list[Launcher],
) -> None:
    binary = Binary()
    repeat_of(binary, (3, Box(64, torch.bfloat16, (8, 4), (4, 1), (2, 4), None)))(80)
    (launched,) = binary.ordinary
    assert launched[9] == 3
    assert launched[10].data_ptr() == 80
    assert made == []


def test_repeat_does_not_trust_a_launcher_that_changes_arguments(
    made: list[Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    args, _ = arguments()
    for launcher in (Launcher, LaterLauncher):
        original = launcher.__call__
        monkeypatch.setattr(
            launcher, "__call__", lambda self, *given, way=original: way(self, *given[:-4], 1, 2)
        )
    binary = Binary()
    repeat_of(binary, args)(100, 200, 300)
    assert len(binary.ordinary) == 1


class Otherwise:
    """What launchers may be one day: not called as today's, or without a function to look into."""

    def __init__(self, src: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize("make", [Otherwise, lambda source: None, lambda *_: len, None])
def test_repeat_takes_the_usual_launcher_of_a_triton_that_it_does_not_know(
    make: Any, made: list[Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.runtime.driver.active, "launcher_cls", make)
    args, _ = arguments()
    binary = Binary()
    repeat_of(binary, args)(100, 200, 300)
    assert len(binary.ordinary) == 1
    assert made == []


def test_repeat_is_launched_on_its_own_gpu(
    made: list[Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    args, _ = arguments()
    entered = []

    class Entered:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)
            monkeypatch.setattr(devices, "current", lambda: 0)

        def __exit__(self, *_: object) -> None:
            pass

    repeat = repeat_of(Binary(), args)
    monkeypatch.setattr(devices, "current", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", Entered)
    repeat(100, 200, 300)
    assert entered == [0]
    assert len(made[0].given) == 1
