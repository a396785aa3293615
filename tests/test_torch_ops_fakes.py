"""The operators without memory: schemas, shapes and devices, refusals, export, dispatch modes."""

from __future__ import annotations

import contextlib
import io
import types
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from traced import CALLS, CASES, E4M3, IDS, as_fake, assert_same_bits, public, tensors

import tritonattn
from tritonattn import device as devices
from tritonattn import launch, torch_ops
from tritonattn.tracing import is_traced

PLAIN = {"alibi_slopes", "attention_temperature"}
NAMES = [
    name
    for name in tritonattn.__all__
    if isinstance(public(name), types.FunctionType) and name not in PLAIN | {"warmup"}
]
every_call = pytest.mark.parametrize(("name", "build"), CALLS, ids=IDS)


class Recorder(TorchDispatchMode):
    """Runs everything, and keeps this package's operators that it saw, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "tritonattn":
            self.seen.append((op, args))
        return op(*args, **(kwargs or {}))


def test_every_public_function_that_launches_is_an_operator() -> None:
    assert sorted(NAMES) == sorted({name for name, _ in CALLS})
    for name in NAMES:
        assert getattr(torch.ops.tritonattn, name).default.namespace == "tritonattn"


@every_call
def test_operator_sees_all_arguments_and_marks_what_it_writes(name, build, device) -> None:
    """What memory changed is what the schema says."""
    args, options = build(device)
    with Recorder() as recorder:
        result = public(name)(*args, **options)
    [(op, packed)] = recorder.seen
    schema = op._schema
    assert schema.name == f"tritonattn::{name}"
    expected_args, expected_options = build(device)
    assert_same_bits(result, public(name)(*expected_args, **expected_options))
    marked = {
        id(x)
        for argument, value in zip(schema.arguments, packed, strict=True)
        if argument.is_write
        for x in tensors(value)
    }
    before = build(device)
    for x, old in zip(tensors((args, options)), tensors(before), strict=True):
        same = torch.equal(*(y.flatten().view(torch.uint8) for y in (x, old)))
        assert same or id(x) in marked
    given = {id(x) for x in tensors((args, options))}
    assert given <= {id(x) for x in tensors(packed)}  # no option's tensor is lost


@every_call
def test_operator_passes_opcheck(name, build, device) -> None:
    # Torch compares no float8: the same call with a float16 cache.
    args, options = torch.utils._pytree.tree_map(
        lambda x: x.half() if isinstance(x, Tensor) and x.dtype == E4M3 else x, build(device)
    )
    with Recorder() as recorder:
        public(name)(*args, **options)
    [(op, packed)] = recorder.seen
    torch.library.opcheck(op, packed)


def places() -> list[str]:
    """Where a fake may be: torch makes none on a GPU past those of a machine that has some."""
    count = torch.cuda.device_count()
    gpus = [f"cuda:{i}" for i in ({0, count - 1} if count else (0, 7))]
    return ["cpu", *gpus] if devices.interpreting() else gpus


@every_call
def test_fake_result_is_like_the_real_one_without_a_gpu(name, build, device) -> None:
    args, options = build("cpu")
    real = tensors(public(name)(*build(device)[0], **build(device)[1]))
    for where in places():
        mode = FakeTensorMode()
        fake_args, fake_options = as_fake((args, options), mode, where)
        with mode if where == "cuda:0" else mock.MagicMock():  # fakes are enough by themselves
            fakes = tensors(public(name)(*fake_args, **fake_options))
        assert len(fakes) == len(real)
        for fake, x in zip(fakes, real, strict=True):
            assert isinstance(fake, FakeTensor)
            assert fake.device == torch.device(where)
            assert (fake.shape, fake.stride(), fake.dtype) == (x.shape, x.stride(), x.dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_fake_gpu_needs_no_gpu_where_the_interpreter_is_forbidden() -> None:
    args, options = as_fake(CASES[0].build(), FakeTensorMode(), "cuda:9")
    args = tuple(x.to(torch.bfloat16) if x.is_floating_point() else x for x in args)
    with mock.patch.object(devices, "interpreting", return_value=False):
        out = tritonattn.varlen_attention(*args, **options)
    assert (out.device, out.dtype) == (torch.device("cuda:9"), torch.bfloat16)


# Who goes through the dispatcher


def test_eager_calls_do_not_go_through_the_dispatcher(device) -> None:
    refuse = mock.patch.multiple(torch_ops, traced=mock.DEFAULT, traced_attention=mock.DEFAULT)
    with refuse as mocks:
        for name, build in CALLS:
            args, options = build(device)
            public(name)(*args, **options)
        assert not any(m.called for m in mocks.values())


@pytest.mark.parametrize("is_operator", [False, True])
def test_operator_shares_no_memory_with_eager_calls(is_operator, device) -> None:
    shared = []

    def take(place: object, like: Tensor, numel: int, **how: bool) -> Tensor:
        shared.append(how["shared"])
        return like.new_empty(numel, dtype=torch.float32)

    args, options = CASES[2].build(device)  # with several splits
    run = contextlib.nullcontext() if not is_operator else Recorder()
    with mock.patch.object(launch, "take", take), run:
        tritonattn.prefix_attention(*args, **options)
    assert shared == [not is_operator]


def test_is_traced_tells_plain_tensors_from_those_that_others_handle() -> None:
    x = torch.ones(2)

    class Named(Tensor):
        pass

    plain = [x, torch.nn.Parameter(x), x.as_subclass(Named), [x], None, 1.0]
    assert not any(map(is_traced, plain))
    assert is_traced(as_fake(x, FakeTensorMode()))
    with Recorder():
        assert all(map(is_traced, plain))
    assert torch.compile(is_traced, backend="eager", fullgraph=True)(x)


def test_parameters_are_attended_to_and_written_in_eager(device) -> None:
    """Subclasses without a dispatch of their own are plain tensors to the operators too."""
    for name, build in CALLS:
        args, options = build(device)

        def parameter(x: Any) -> Any:
            return torch.nn.Parameter(x, requires_grad=False) if isinstance(x, Tensor) else x

        args, options = torch.utils._pytree.tree_map(parameter, (args, options))
        with Recorder() as recorder:
            result = public(name)(*args, **options)
        expected_args, expected_options = build(device)
        assert_same_bits(result, public(name)(*expected_args, **expected_options))
        assert len(recorder.seen) == 1


# Export


class Layer(torch.nn.Module):
    """Writes to a cache that is a buffer, then attends to it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 2, 4, 2, 16))

    def forward(self, q: Tensor, k: Tensor, slots: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        caches = self.cache.unbind(1)
        tritonattn.write_kv_cache(k, k, *caches, slots)
        return tritonattn.paged_attention(q, *caches, table, lens, window_size=(3, None))


@pytest.mark.parametrize("strict", [True, False])
def test_exported_layer_gives_eager_bits_for_any_batch(strict, device) -> None:
    def inputs(batch: int) -> tuple[Tensor, ...]:
        q, k = torch.randn(batch, 4, 16), torch.randn(batch, 2, 16)
        table = torch.arange(batch, dtype=torch.int32)[:, None]
        slots, lens = torch.arange(batch) * 4, torch.ones(batch, dtype=torch.int32)
        return tuple(x.to(device) for x in (q, k, slots, table, lens))

    batch = torch.export.Dim("batch", min=2, max=64)
    sizes = tuple({0: batch} for _ in range(5))
    program = torch.export.export(
        Layer().to(device), inputs(2), dynamic_shapes=sizes, strict=strict
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded, layer = torch.export.load(file).module(), Layer().to(device)
    for each in (inputs(3), inputs(4)):
        assert_same_bits(loaded(*each), layer(*each))
        assert_same_bits(loaded.cache, layer.cache)
