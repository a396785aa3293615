"""Head sizes, head ratios, pages and float8 caches: faults that other attention kernels had."""

from __future__ import annotations

import math

import pytest
import torch
from faults import (
    CACHED_PATHS,
    FUNCTIONS,
    PAGED,
    PREFIX,
    VARLEN,
    Path,
    arrange,
    assert_result,
    case,
    check,
    check_case,
    every_cached_path,
    every_path,
    rows,
)

from tritonattn.testing import Case

# Head dimensions


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "dims",
    [
        *((d, d) for d in (1, 7, 32, 56, 59, 72, 80, 96, 111, 112, 120, 160, 192, 256)),
        *((48, 32), (32, 48), (192, 128), (576, 512)),
    ],
    ids=str,
)
def test_attention_takes_any_head_dim(function, dims, device):
    """vllm 4127, 4171, sglang PR 1281, FlashInfer 790: refused; aiter PR 3698: written too wide.

    What lies beside q, k, v and the pool is NaN, what lies beside out must stay as it was.
    """
    how = {"layout": "sliced", "pool_layout": "sliced", "out": "sliced", "poison": "nan"}
    check_case(Path(function), (9,), (2,), device, heads=(2, 1), head_dims=dims, **how)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dims", [(59, 59), (48, 32), (80, 112)], ids=str)
@pytest.mark.parametrize("num_splits", [3, 8])
def test_attention_takes_any_head_dim_when_split(function, dims, num_splits, device):
    path = Path(function, num_splits, small_tiles=True)
    how = {"out": "sliced", "poison": "nan", "page_size": 3}
    check_case(path, (40,), (1,), device, heads=(1, 1), head_dims=dims, **how)


@every_path
@pytest.mark.parametrize(("dim", "first"), [(128, 64), (80, 64), (192, 128), (24, 16)])
def test_attention_uses_all_of_a_head(path, dim, first, device):
    """triton 621: 64 of 128 dimensions were used.  Here keys differ in those from ``first`` on."""
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(2, 1, dim, generator=gen).to(path.dtype)
    k = torch.ones(5, 1, dim, dtype=path.dtype)
    k[..., first:] = torch.randn(5, 1, dim - first, generator=gen).to(path.dtype)
    v = torch.eye(5, dtype=path.dtype)[:, None]
    args, options = arrange(path, q, k, v, device, softmax_scale=1.0)
    out, _ = check(path, args, options)
    assert out[1, 0, :5].max() > 2 * out[1, 0, :5].min()  # so that equal weights are not right


# Heads


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("heads", [(10, 2), (28, 4), (9, 3), (17, 1), (71, 1), (3, 3)], ids=str)
def test_attention_takes_any_number_of_heads_a_kv_head(function, heads, device):
    """vllm 18088, PR 23424, FlashInfer 996: groups of 5 and 7, and of more than 16."""
    check_case(Path(function), (9, 2), (2, 1), device, heads=heads, head_dims=(16, 16))
    tiles = Path(function, small_tiles=True, plain_decode=True)
    if heads[0] < 20:
        check_case(tiles, (9,), (1,), device, heads=heads, head_dims=(16, 16))


@every_path
def test_attention_head_reads_its_own_kv_head(path, device):
    """Query head h reads KV head h // group: the value says which."""
    q, k = torch.zeros(1, 6, 16), torch.zeros(3, 2, 16)
    v = torch.tensor([1.0, 2.0]).view(1, 2, 1).expand(3, 2, 8).contiguous()
    args, options = arrange(path, q, k, v, device)
    assert_result(path, args, options, torch.tensor([1.0, 1, 1, 2, 2, 2]).view(1, 6, 1))


# Pages


@pytest.mark.parametrize("function", [PREFIX, PAGED])
@pytest.mark.parametrize("page_size", [1, 12, 16, 24, 256, 544, 2048])
def test_attention_takes_any_page_size(function, page_size, device):
    """FlashInfer 4347: big pages were read wrongly.  20 keys, in pages of 256 among others."""
    how = {"heads": (2, 1), "head_dims": (16, 16), "page_size": page_size, "poison": "nan"}
    check_case(Path(function), (20, 1), (1, 1), device, **how)


@pytest.mark.parametrize("path", CACHED_PATHS, ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_attention_tiles_may_cross_pages(path, page_size, device):
    how = {"heads": (1, 1), "head_dims": (16, 16), "page_size": page_size, "poison": "nan"}
    check_case(path, (37,), (2,), device, **how)


# float8 caches


@every_cached_path
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_attention_scales_the_cached_part_alone(path, cache_dtype, device):
    """vllm 3156, PR 7208: 20 keys in a float8 cache, scaled, and 4 new ones, not scaled."""
    how = {"heads": (4, 2), "head_dims": (32, 32), "cache_dtype": cache_dtype, "poison": "nan"}
    check_case(path, (24,), (4,), device, **how, kv_scale="[Hkv]")
    if path.function != PREFIX:
        return
    # The same said by numbers: 3 cached keys of value 1, stored as .5 with scale 2, and a new one.
    q, k, v = rows([0.0] * 4, [0.5, 0.5, 0.5, 0.5])
    options = {"k_scale": 9.0, "v_scale": 2.0, "softmax_scale": 1.0}
    args, options = arrange(path, q, k, v, device, cache_dtype=cache_dtype, **options)
    assert_result(path, args, options, (3 * 1.0 + 0.5) / 4, math.log(4))


STORED_K, STORED_V = [2.0, -2.0], [1.0, 3.0]
KV_SCALES = {
    "float": (0.5, 2.0),
    "[]": (torch.tensor(0.5), torch.tensor(2.0)),
    "[1]": (torch.tensor([0.5]), torch.tensor([2.0])),
    "[Hkv]": (torch.tensor([0.5]), torch.tensor([2.0])),
    "[B, Hkv]": (torch.tensor([[0.5]]), torch.tensor([[2.0]])),
    "mixed": (0.5, torch.tensor([[2.0]])),
}


@pytest.mark.parametrize("path", [p for p in CACHED_PATHS if p.function == PAGED], ids=str)
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("scales", KV_SCALES)
def test_paged_attention_multiplies_what_is_stored_by_its_scale(path, cache_dtype, scales, device):
    """sglang PR 18882: scales were taken as 1."""
    k_scale, v_scale = (
        x.to(device) if isinstance(x, torch.Tensor) else x for x in KV_SCALES[scales]
    )
    how = {"softmax_scale": 1.0, "k_scale": k_scale, "v_scale": v_scale}
    made = rows(STORED_K, STORED_V)
    args, options = arrange(path, *made, device, cache_dtype=cache_dtype, **how)
    p0 = 1 / (1 + math.exp(-2))  # logits 1 and -1
    assert_result(path, args, options, 2 * p0 + 6 * (1 - p0))  # 2.4768


@pytest.mark.parametrize("path", [p for p in CACHED_PATHS if p.function == PAGED], ids=str)
def test_paged_attention_takes_no_scale_for_1(path, device):
    made = rows(STORED_K, STORED_V)
    how = {"cache_dtype": torch.float8_e4m3fn, "softmax_scale": 1.0}
    args, options = arrange(path, *made, device, **how)
    out = path(*args, **options)
    assert torch.equal(out, path(*args, **options, k_scale=1.0, v_scale=1.0))
    p0 = 1 / (1 + math.exp(-4))
    assert_result(path, args, options, p0 + 3 * (1 - p0))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("batched", [False, True])
def test_attention_takes_the_scale_of_each_kv_head(function, batched, device):
    """vllm PR 42580: the first head's scale was used for all.  Here the second one's is 4 times it.

    For new keys of ``prefix_attention`` no scale holds, so there 16 keys are cached and one is new.
    """
    path = Path(function)
    k_scale = torch.tensor([1.0, 4.0], device=device)
    v_scale = torch.tensor([2.0, 0.5], device=device)
    if batched:
        k_scale = torch.stack([k_scale, k_scale.flip(0)])
        v_scale = torch.stack([v_scale, v_scale.flip(0)])
    how = {"heads": (4, 2), "head_dims": (16, 16), "poison": "nan"}
    if function != VARLEN:
        how["cache_dtype"] = torch.float8_e4m3fn
    args, options = case(path, (17, 5), (1, 1), **how).build(device)
    scaled = options | {"k_scale": k_scale, "v_scale": v_scale}
    check(path, args, scaled)
    first = options | {"k_scale": float(k_scale.flatten()[0]), "v_scale": 2.0}
    other = path(*args, **first)
    out = path(*args, **scaled)
    assert torch.equal(out[0, :2], other[0, :2])
    assert (out[0, 2:] != other[0, 2:]).any()


@pytest.mark.parametrize("function", [PREFIX, PAGED])
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_attention_reads_every_float8_value_exactly(function, cache_dtype, dtype, device):
    """One cached key a row, so that out is its value: every byte, subnormals, -0 and NaN included.

    A new key of weight 0 stands beside it in ``prefix_attention``.
    """
    path = Path(function)
    values = torch.arange(256, dtype=torch.uint8).view(cache_dtype).view(8, 1, 32)
    wide = values.to(dtype)
    finite = wide.isfinite()
    k = torch.zeros(8, 1, 16, dtype=dtype)
    q = torch.ones(8, 1, 16, dtype=dtype)
    lens = [1] * 8
    if function == PREFIX:
        k, lens = torch.zeros(16, 1, 16, dtype=dtype), [2] * 8
        k[1::2] = -2000.0  # weight e^-8000
    v = torch.zeros(sum(lens), 1, 32, dtype=dtype)
    args, options = arrange(
        path, q, k, v, device, q_lens=[1] * 8, k_lens=lens, cache_dtype=cache_dtype
    )
    at = 3 if function == PREFIX else 1
    for b in range(8):
        page = args[at + 1].view(torch.uint8)[args[at + 2][b, 0]]
        page[0] = values[b].view(torch.uint8)
    out = path(*args, **options).cpu()
    assert torch.equal(out[finite], wide[finite])
    assert out[~finite].isfinite().sum() == 0


@pytest.mark.parametrize("path", [p for p in CACHED_PATHS if p.small_tiles], ids=str)
def test_attention_over_float8_equals_that_over_its_values(path, device):
    """The bytes and the values that they stand for, in a cache of q's dtype."""
    how = {"heads": (2, 2), "head_dims": (32, 32), "cache_dtype": torch.float8_e4m3fn}
    args, options = Case(path.function, (21,), (1,), **how).build(device)
    wide = tuple(x.to(torch.float16) if x.dtype == torch.float8_e4m3fn else x for x in args)
    assert torch.equal(path(*args, **options), path(*wide, **options))
