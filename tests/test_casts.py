"""Number formats: every byte, and every float32 that could round wrongly, against torch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tritonattn import binaries
from tritonattn.device import INTERPRETER, describe
from tritonattn.kernels import casts
from tritonattn.problem import FP8_FORMATS
from tritonattn.testing import same_bytes

FLOAT8 = {name: dtype for dtype, name in FP8_FORMATS.items()}
WIDE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
BLOCK = 1 << 14

every_format = pytest.mark.parametrize("name", FLOAT8)
# numpy says so where a float32 is too large for a float16.
may_overflow = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")


@triton.jit
def decode_kernel(
    x, y, n, FORMAT: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(x + i, mask=i < n, other=0)
    tl.store(y + i, casts.decode(raw, FORMAT, DTYPE, NATIVE), mask=i < n)


@triton.jit
def decode_pairs_kernel(
    x, y, n, FORMAT: tl.constexpr, DTYPE: tl.constexpr, UPPER: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low, high = casts.decode_pairs(tl.load(x + i, mask=i < n, other=0), FORMAT, DTYPE)
    tl.store(y + i, high if UPPER else low, mask=i < n)


@triton.jit
def encode_kernel(x, y, n, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(y + i, casts.encode(value, FORMAT), mask=i < n)


@triton.jit
def round_kernel(x, y, n, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(y + i, casts.round_to(value, DTYPE, INTERPRETED), mask=i < n)


@triton.jit
def widen_kernel(x, y, n, INTERPRETED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(y + i, casts.widen(value, INTERPRETED), mask=i < n)


def run(
    kernel: object, x: Tensor, dtype: torch.dtype, device: torch.device, **constants: object
) -> Tensor:
    x = x.to(device)
    y = torch.empty(x.shape, dtype=dtype, device=device)
    grid, constants = triton.cdiv(x.numel(), BLOCK), constants | {"BLOCK": BLOCK}
    args = (x, y, x.numel())
    binaries.launch(kernel, grid, args, constants, binaries.Options(), describe(device), device)
    return y.cpu()


def same_values(a: Tensor, b: Tensor) -> Tensor:
    """Equal bit for bit, but that any NaN equals any other."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    return (a.view(bits) == b.view(bits)) | (a.float().isnan() & b.float().isnan())


def all_float16() -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)


def awkward_floats() -> Tensor:
    """All of float16 and bfloat16, random bits, each format's values and the ties between them,
    and the next float32 on either side of all these."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    gen = torch.Generator().manual_seed(0)
    anything = torch.randint(-(2**31), 2**31 - 1, (50_000,), generator=gen, dtype=torch.int32)
    parts = [bits.view(torch.float16).float(), bits.view(torch.bfloat16).float()]
    parts.append(anything.view(torch.float32))
    for dtype in (torch.float16, torch.bfloat16, *FLOAT8.values()):
        size = 8 * dtype.itemsize
        codes = torch.arange(2**size).to(torch.uint8 if size == 8 else torch.int16)
        values = codes.view(dtype).double()
        values = values[values.isfinite()].unique()
        parts.append(((values[1:] + values[:-1]) / 2).float())
    x = torch.cat(parts)
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    return torch.cat([x, torch.nextafter(x, up), torch.nextafter(x, down)])


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@every_format
def test_decode_gives_torchs_value_of_every_byte(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    gpu = describe(device)
    if dtype == torch.bfloat16 and not gpu.has_bf16:
        pytest.skip(f"{gpu.title} has no bfloat16")
    raw = torch.arange(256).to(torch.uint8)
    expected = raw.view(FLOAT8[name]).float().to(dtype)
    for native in {False, gpu.has_native_e4m3}:
        constants = {"FORMAT": name, "DTYPE": WIDE[dtype], "NATIVE": native}
        decoded = run(decode_kernel, raw, dtype, device, **constants)
        wrong = ~same_values(decoded, expected)
        assert not wrong.any(), (native, raw[wrong], decoded[wrong], expected[wrong])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_decode_pairs_gives_torchs_values_of_all_pairs(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    gpu = describe(device)
    if not gpu.has_native_e4m3:
        pytest.skip(f"{gpu.title} does not convert float8")
    pairs = torch.arange(-(2**15), 2**15).to(torch.int16)
    expected = pairs.view(FLOAT8[name]).float().to(dtype).view(-1, 2)
    for upper in (0, 1):
        constants = {"FORMAT": name, "DTYPE": WIDE[dtype], "UPPER": bool(upper)}
        decoded = run(decode_pairs_kernel, pairs, dtype, device, **constants)
        wrong = ~same_values(decoded, expected[:, upper].contiguous())
        assert not wrong.any(), (upper, pairs[wrong], decoded[wrong], expected[wrong])


@every_format
def test_encode_rounds_and_saturates_as_torch_does(name: str, device: torch.device) -> None:
    x = awkward_floats()
    limit = torch.finfo(FLOAT8[name]).max
    expected = x.clamp(-limit, limit).to(FLOAT8[name])
    encoded = run(encode_kernel, x, torch.uint8, device, FORMAT=name).view(FLOAT8[name])
    wrong = ~same_values(encoded, expected)
    assert not wrong.any(), (x[wrong], encoded[wrong], expected[wrong])


@every_format
def test_encode_undoes_decode(name: str, device: torch.device) -> None:
    values = torch.arange(256).to(torch.uint8).view(FLOAT8[name])
    values = values[values.float().isfinite()]
    encoded = run(encode_kernel, values.float(), torch.uint8, device, FORMAT=name)
    assert torch.equal(encoded, values.view(torch.uint8))


@every_format
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=64))
def test_encode_of_any_float_is_torchs(
    name: str, device: torch.device, values: list[float]
) -> None:
    x = torch.tensor(values)
    limit = torch.finfo(FLOAT8[name]).max
    encoded = run(encode_kernel, x, torch.uint8, device, FORMAT=name).view(FLOAT8[name])
    assert same_values(encoded, x.clamp(-limit, limit).to(FLOAT8[name])).all()


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_widen_keeps_every_value(dtype: torch.dtype, device: torch.device) -> None:
    gpu = describe(device)
    x = all_float16().view(dtype) if dtype.itemsize == 2 else awkward_floats()
    widened = run(widen_kernel, x, torch.float32, device, INTERPRETED=gpu == INTERPRETER)
    wrong = ~same_values(widened, x.float())
    assert not wrong.any(), (x[wrong], widened[wrong])


@may_overflow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_round_to_rounds_to_nearest_even(dtype: torch.dtype, device: torch.device) -> None:
    gpu = describe(device)
    if dtype == torch.bfloat16 and not gpu.has_bf16:
        pytest.skip(f"{gpu.title} has no bfloat16")
    x = awkward_floats()
    constants = {"DTYPE": WIDE[dtype], "INTERPRETED": gpu == INTERPRETER}
    rounded = run(round_kernel, x, dtype, device, **constants)
    wrong = ~same_values(rounded, x.to(dtype))
    assert not wrong.any(), (x[wrong], rounded[wrong], x.to(dtype)[wrong])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_round_to_leaves_what_has_the_dtype_already(
    dtype: torch.dtype, device: torch.device
) -> None:
    gpu = describe(device)
    x = all_float16().view(dtype)
    constants = {"DTYPE": WIDE[dtype], "INTERPRETED": gpu == INTERPRETER}
    assert same_bytes(run(round_kernel, x, dtype, device, **constants), x)
