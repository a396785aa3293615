"""Caches as memory: what a function wrote is compared with all that it was not to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tritonattn import reference, write_kv_cache
from tritonattn.testing import generator

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT8 = (E4M3, E5M2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
WIDE = (torch.float16, torch.bfloat16, torch.float32)
PAGE_SIZES = (1, 3, 12, 16, 64)
DIMS = ((16, 16), (64, 64), (20, 12), (24, 40), (72, 1))
every_wide = pytest.mark.parametrize("dtype", WIDE, ids=str)
every_float8 = pytest.mark.parametrize("dtype", FLOAT8, ids=str)
may_overflow = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def memory(x: Tensor) -> Tensor:
    """All bytes of the storage behind ``x``, on the CPU."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).cpu()


def twins(*tensors: Tensor) -> list[Tensor]:
    """The same views of copies of their storages, on the CPU."""
    copies = {x.untyped_storage().data_ptr(): memory(x).clone() for x in tensors}
    return [
        copies[x.untyped_storage().data_ptr()]
        .view(x.dtype)
        .as_strided(x.shape, x.stride(), x.storage_offset())
        for x in tensors
    ]


def assert_same_memory(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        same = memory(a) == memory(e)
        assert same.all(), f"bytes {(~same).nonzero()[:8, 0].tolist()} differ"


def bits(x: Tensor) -> Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return x.view(integer)


def slots(values: Sequence[int], device: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def int32(values: Sequence[int], device: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def check_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, mapping: Tensor, **scales: Any
) -> None:
    """The write is torch's, in all memory around the caches."""
    expected = twins(k_cache, v_cache)
    on_cpu = {n: s.cpu() if isinstance(s, Tensor) else s for n, s in scales.items()}
    reference.write_kv_cache(k.cpu(), v.cpu(), *expected, mapping.cpu(), **on_cpu)
    write_kv_cache(k, v, k_cache, v_cache, mapping, **scales)
    assert_same_memory((k_cache, v_cache), expected)


def draw_scale(data: st.DataObject, num_heads: int, batch: int | None, device: Any) -> Any:
    shapes = [None, "float", (), (1,), (num_heads,)] + [(batch, num_heads)] * (batch is not None)
    shape = data.draw(st.sampled_from(shapes), "scale")
    if shape is None:
        return None
    gen = generator(data.draw(st.integers(0, 9)))
    scale = 0.05 + 3 * torch.rand(shape if shape != "float" else (), generator=gen)
    return float(scale) if shape == "float" else scale.to(device)
