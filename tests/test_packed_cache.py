"""vLLM's packed cache layout: converted without loss, and refused in words where it cannot be."""

from __future__ import annotations

import pytest
import torch
from caches import memory

from tritonattn import ArgumentTypeError, ArgumentValueError
from tritonattn.integrations.packed_cache import pack_kv_cache, unpack_kv_cache
from tritonattn.testing import same_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8)


def bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bits, NaN's included."""
    torch.manual_seed(0)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpack_kv_cache_finds_every_value_where_vllm_put_it(dtype):
    x = 16 // dtype.itemsize
    k_packed = bits(3, 2, 2, 5, x, dtype=dtype)
    v_packed = bits(3, 2, 7, 5, dtype=dtype)
    k_cache, v_cache = unpack_kv_cache(k_packed, v_packed)
    assert k_cache.shape == (3, 5, 2, 2 * x)
    assert v_cache.shape == (3, 5, 2, 7)
    for page, offset, head in ((0, 0, 0), (1, 4, 1), (2, 3, 0)):
        for d in range(2 * x):
            value = k_packed[page, head, d // x, offset, d % x : d % x + 1]
            assert same_bytes(k_cache[page, offset, head, d : d + 1], value)
        values = v_packed[page, head, :, offset]
        assert same_bytes(v_cache[page, offset, head], values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pack_kv_cache_undoes_unpack_kv_cache(dtype):
    x = 16 // dtype.itemsize
    packed = bits(3, 2, 2, 5, x, dtype=dtype), bits(3, 2, 7, 5, dtype=dtype)
    again = pack_kv_cache(*unpack_kv_cache(*packed))
    for one, other in zip(again, packed, strict=True):
        assert one.shape == other.shape
        assert same_bytes(one, other)


def test_unpack_kv_cache_writes_views_of_a_pool_and_nothing_around_them():
    packed = bits(3, 2, 2, 5, 8, dtype=torch.float16), bits(3, 2, 16, 5, dtype=torch.float16)
    pool = torch.zeros(3, 6, 2, 2, 20, dtype=torch.float16)  # K and V of a token side by side
    out = pool[:, :5, :, 0, 2:18], pool[:, :5, :, 1, 2:18]
    assert unpack_kv_cache(*packed, out=out)[0] is out[0]
    for one, other in zip(out, unpack_kv_cache(*packed), strict=True):
        assert same_bytes(one, other)
    for one in out:
        one.zero_()
    assert not memory(pool).any()


def test_packed_conversion_of_some_pages_is_that_of_all():
    packed = bits(6, 2, 2, 4, 8, dtype=torch.float16), bits(6, 2, 16, 4, dtype=torch.float16)
    ids = torch.tensor([4, 0, 3])
    for part, whole in zip(
        unpack_kv_cache(*(p[ids] for p in packed)), unpack_kv_cache(*packed), strict=True
    ):
        assert same_bytes(part, whole[ids])


K, V = torch.zeros(3, 2, 2, 5, 8), torch.zeros(3, 2, 16, 5)
CACHE, PACKED_K = torch.zeros(3, 5, 2, 16), torch.zeros(3, 2, 4, 5, 4)


@pytest.mark.parametrize(
    ("function", "args", "out", "error", "words"),
    [
        (unpack_kv_cache, (K[0], V), None, ArgumentValueError, r"k_packed must have 5 axes"),
        (unpack_kv_cache, (K, K), None, ArgumentValueError, r"v_packed must have 4 axes"),
        (unpack_kv_cache, (K, [1]), None, ArgumentTypeError, r"v_packed must be a tensor"),
        (unpack_kv_cache, (K, V.half()), None, ArgumentTypeError, r"v_packed must have the dtype"),
        (unpack_kv_cache, (K, V[:2]), None, ArgumentValueError, r"must have 3 on axis 0"),
        (unpack_kv_cache, (K, V[:, :1]), None, ArgumentValueError, r"must have 2 on axis 1"),
        (unpack_kv_cache, (K, V[..., :4]), None, ArgumentValueError, r"must have 5 on axis 3"),
        (unpack_kv_cache, (K, V.to("meta")), None, ArgumentValueError, r"on the device of k_p"),
        (unpack_kv_cache, (K, V), CACHE, ArgumentTypeError, r"out must be None or a pair"),
        (unpack_kv_cache, (K, V), (CACHE, CACHE[:2]), ArgumentValueError, r"out\[1\] must be \["),
        (unpack_kv_cache, (K, V), (CACHE.half(), CACHE), ArgumentTypeError, r"out\[0\] must have"),
        (
            unpack_kv_cache, (K, V), (CACHE, CACHE.repeat_interleave(2, -1)[..., ::2]),
            ArgumentValueError, r"out\[1\] must have stride 1",
        ),
        (pack_kv_cache, (CACHE[..., :14], CACHE), None, ArgumentValueError, r"multiple of 4 dims"),
        (pack_kv_cache, (CACHE, CACHE[:2]), None, ArgumentValueError, r"must have 3 on axis 0"),
        (pack_kv_cache, (3, CACHE), None, ArgumentTypeError, r"k_cache must be a tensor"),
        (
            pack_kv_cache, (CACHE, CACHE), (PACKED_K, V[:1].expand(3, -1, -1, -1)),
            ArgumentValueError, r"must have its own memory",
        ),
    ],
)  # fmt: skip
def test_packed_conversion_refuses_what_does_not_fit(function, args, out, error, words):
    with pytest.raises(error, match=words) as caught:
        function(*args, out=out)
    assert str(caught.value).startswith(f"{function.__name__}: ")
