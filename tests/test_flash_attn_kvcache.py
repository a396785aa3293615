"""``flash_attn_with_kvcache``: every argument, alone, in pairs and drawn, against plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flash import pairs
from flash_cached import Cached
from hypothesis import given
from hypothesis import strategies as st

from tritonattn.flash_attn import flash_attn_with_kvcache
from tritonattn.flash_attn.rotary import Rotary, rotate
from tritonattn.testing import POOL_LAYOUTS, assert_close, generator, normal

fp16, bf16, f32, fp8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn

# The axes that flash-attn's own test of this function is parametrised over.
PATTERNS = pairs(
    {
        "new": (None, 1, "q_lens"),
        "masked": ("", "causal", "local"),
        "alibi": (0, 1),
        "heads": ((2, 2), (4, 2), (3, 1)),
        "rotary": (0, 4, 8),
        "interleaved": (True, False),
        "page_size": (0, 16),
        "batch_idx": (False, True),
        "leftpad": (None, (2, 0, 5)),
        "q_lens": (1, 3),
        "num_splits": (0, 1, 2),
        "dtype": (fp16, bf16),
    }
)


def pattern(row: dict[str, Any]) -> Cached:
    """A row of PATTERNS: rotary comes with new keys only."""
    given = dict(row)
    masked, new = given.pop("masked"), given.pop("new")
    given["new"] = given["q_lens"] if new == "q_lens" else new
    given["causal"] = masked == "causal"
    given["window_size"] = (4, 1) if masked == "local" else (-1, -1)
    if new is None:
        given["rotary"] = 0
    return Cached(lens=(7, 0, 12) if given["leftpad"] is None else (7, 1, 12), **given)


@pytest.mark.parametrize("row", PATTERNS, ids=lambda row: repr(pattern(row)))
def test_flash_attn_with_kvcache_carries_flash_attns_own_patterns(row, device):
    pattern(row).check(device)


ARGUMENTS = [
    Cached(lens=(5, 5), new=2, q_lens=2, seqlens="int", causal=True),
    Cached(lens=(6, 6), seqlens="none", q_lens=2),
    Cached(lens=(6, 6), seqlens="none", page_size=4),
    Cached(lens=(9, 4), softcap=3.0),
    Cached(lens=(9, 4), softmax_scale=0.7, lse=False),
    Cached(lens=(9, 4), sinks="s_aux"),
    Cached(lens=(9, 4), sinks="sinks", q_lens=2, causal=True),
    Cached(lens=(9, 4), chunk=3, q_lens=2, causal=True),
    Cached(lens=(9, 4), alibi=2, q_lens=2, causal=True),
    Cached(lens=(9, 4), page_size=3, table_name="page_table"),
    Cached(lens=(9, 4), q_lens=(3, 1), causal=True),
    Cached(lens=(9, 4), q_lens=(3, 0), new=(2, 4), page_size=1, causal=True, padding_rows=2),
    Cached(lens=(9, 4), q_lens=(3, 1), new=(3, 1), rotary=6, causal=True, padding_rows=1),
    Cached(lens=(9, 4), q_lens=3, new=3, rotary=6, rotary_seqlens=True, window_size=(5, -1)),
    Cached(lens=(9, 4), q_lens=3, new=3, rotary=6, rotary_seqlens=True),
    Cached(lens=(9, 4), new=1, cache_dtype=fp8, dtype=bf16, descale="[Hkv]", page_size=4),
    Cached(lens=(9, 4), new=2, cache_dtype=fp8, dtype=fp16, descale="float", rotary=4),
    Cached(lens=(9, 4), cache_dtype=torch.float8_e5m2, dtype=fp16, descale="[B, Hkv]"),
    Cached(lens=(9, 4), descale="float", q_lens=2),
    Cached(lens=(9, 4), head_dims=(24, 40), new=1, dtype=fp16, heads=(7, 1)),
    Cached(lens=(9, 4), new=2, q_lens=1, causal=True),
    Cached(lens=(9, 4), new=1, q_lens=4, causal=True, rotary=8),
    Cached(lens=(), new=1),
    Cached(lens=(), new=(), q_lens=(), padding_rows=2, rotary=4),
    Cached(lens=(3, 4), new=0, q_lens=2),
]


@pytest.mark.parametrize("call", ARGUMENTS, ids=repr)
def test_flash_attn_with_kvcache_obeys_each_argument(call, device):
    call.check(device)


@pytest.mark.parametrize("layout", POOL_LAYOUTS)
@pytest.mark.parametrize("page_size", [0, 4])
def test_flash_attn_with_kvcache_skips_left_padding_in_any_layout(layout, page_size, device):
    leftpad = {"lens": (9, 7, 3), "leftpad": (6, 0, 3), "new": 2, "q_lens": 2}
    Cached(**leftpad, layout=layout, page_size=page_size, causal=True, alibi=1).check(device)


@pytest.mark.parametrize("page_size", [0, 5])
@pytest.mark.parametrize("q_lens", [1, 3])
@pytest.mark.parametrize("new", [None, 1, 3, (2, 1, 3)], ids=str)
def test_flash_attn_with_kvcache_leaves_padded_rows_alone(new, q_lens, page_size, device):
    """A graph's padding has lengths below 0: nothing is written, also if -1 + 3 is above 0."""
    rotary = 0 if new is None else 4
    shape = {"head_dims": (16, 8), "heads": (2, 1), "page_size": page_size}
    Cached((-1, 5, -2), q_lens, new, rotary=rotary, causal=True, **shape).check(device)


def test_flash_attn_with_kvcache_returns_zero_and_minus_inf_for_padded_rows(device):
    call = Cached(lens=(-1, 2), new=1)
    out, lse = flash_attn_with_kvcache(**call.build(device))
    assert (out[0] == 0).all()
    assert lse[0].isneginf().all()
    assert lse[1].isfinite().all()


@pytest.mark.parametrize("page_size", [0, 2])
def test_flash_attn_with_kvcache_writes_nothing_past_the_cache(page_size, device):
    """A row that is full gets no new token, and its neighbour in memory does not get it either."""
    gen = generator(0)
    k_cache, v_cache = normal(2, 6, 2, 1, 8, dtype=f32, generator=gen, device=device)
    args: dict[str, Any] = {}
    capacity = 2
    if page_size:
        args["block_table"] = torch.arange(6, dtype=torch.int32, device=device).view(3, 2)
        capacity = 4
    lens = torch.tensor([capacity, 1, capacity + 7], dtype=torch.int32, device=device)
    q, k, v = normal(3, 3, 1, 1, 8, dtype=f32, generator=gen, device=device)
    where = (2, 1) if page_size else (1, 1)
    expected = k_cache.clone()
    expected[where] = k[1, 0]
    # No query: attention would follow the lengths past the cache.
    flash_attn_with_kvcache(q[:, :0], k_cache, v_cache, k, v, cache_seqlens=lens, **args)
    assert torch.equal(k_cache, expected)


def test_flash_attn_with_kvcache_writes_no_padding_rows_of_packed_keys(device):
    """Arguments are slices of a graph's buffers, in which a further sequence would have a page."""
    call = Cached((3, 2), q_lens=(1, 1), new=(1, 1), page_size=4, padding_rows=2)
    args = call.build(device)
    table, pages = args["block_table"], args["k_cache"].shape[0]
    free = next(page for page in range(pages) if page not in table.flatten().tolist())
    args["block_table"] = torch.cat([table, torch.full_like(table[:1], free)])[:2]
    lens = args["cache_seqlens"]
    args["cache_seqlens"] = torch.cat([lens, torch.zeros_like(lens[:1])])[:2]
    flash_attn_with_kvcache(**args)
    assert args["k_cache"][free].isnan().all()
    assert args["v_cache"][free].isnan().all()


def test_flash_attn_with_kvcache_takes_keys_in_any_strides(device):
    """Slices of one qkv projection, and a last axis that is not contiguous."""
    call = Cached(lens=(4, 2), new=2, q_lens=2, heads=(2, 2), causal=True)
    args = call.build(device)
    plain = flash_attn_with_kvcache(**call.build(device))
    qkv = torch.stack([args["q"], args["k"], args["v"]], dim=2)
    for name, part in zip("qkv", qkv.unbind(2), strict=True):
        args[name] = part
    sliced = flash_attn_with_kvcache(**args)
    for name in "qkv":
        args[name] = args[name].transpose(-1, -2).contiguous().transpose(-1, -2)
    turned = flash_attn_with_kvcache(**args)
    for a, b, c in zip(plain, sliced, turned, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [fp16, bf16, f32], ids=str)
def test_flash_attn_rotary_is_a_product_of_complex_numbers(dtype, interleaved, device):
    """``rotate`` against RoFormer's own formula in float64, rounded once."""
    x = normal(5, 3, 20, dtype=dtype, generator=generator(0), device=device)
    angles = torch.arange(5, device=device)[:, None] * 0.3 ** torch.arange(8, device=device)

    def turned(wide: torch.dtype) -> torch.Tensor:
        part = x[..., :16].to(wide).unflatten(-1, (8, 2) if interleaved else (2, 8))
        part = part if interleaved else part.transpose(-1, -2)
        unit = torch.polar(torch.ones_like(angles, dtype=wide), angles.to(wide))[:, None]
        part = torch.view_as_real(torch.view_as_complex(part.contiguous()) * unit)
        return (part if interleaved else part.transpose(-1, -2)).flatten(-2)

    turn = Rotary(angles.cos(), angles.sin(), interleaved, angles)
    result = rotate(x, turn, torch.arange(5, device=device))
    assert torch.equal(result[..., 16:], x[..., 16:])
    assert_close(result[..., :16], turned(torch.float64), turned(f32).to(dtype), dtype=dtype)


@st.composite
def cached_calls(draw: st.DrawFn) -> Cached:
    """Combinations of all arguments that may go together."""
    maybe = st.booleans
    batch = draw(st.integers(1, 3))
    seqlens = draw(st.sampled_from(("tensor", "tensor", "tensor", "int", "none")))
    lengths = st.integers(0, 14)
    lens = tuple(draw(lengths | st.just(-1)) for _ in range(batch))
    if seqlens != "tensor":
        lens = (draw(lengths),) * batch
    counts = st.integers(0, 4)
    packed = st.tuples(*[counts] * batch)
    q_lens = draw(st.just(1) | counts | packed)
    new = None if seqlens == "none" else draw(st.none() | counts | packed)
    leftpad = None
    if draw(maybe()):
        leftpad = tuple(draw(st.integers(0, max(0, n))) for n in lens)
    dtype = draw(st.sampled_from((fp16, bf16, f32)))
    rotary = draw(st.sampled_from((0, 3, 8))) if new is not None else 0
    descales = ("", "float", "[Hkv]") if new is not None else ("", "float", "[Hkv]", "[B, Hkv]")
    return Cached(
        lens=lens,
        q_lens=q_lens,
        new=new,
        heads=draw(st.sampled_from(((4, 2), (2, 2), (3, 1)))),
        head_dims=draw(st.sampled_from(((16, 16), (24, 40)))),
        dtype=dtype,
        cache_dtype=draw(st.sampled_from((None, None, None, fp8))),
        page_size=draw(st.sampled_from((0, 0, 1, 3, 16))),
        layout=draw(st.sampled_from(POOL_LAYOUTS)),
        seqlens=seqlens,
        batch_idx=draw(maybe()),
        leftpad=leftpad,
        rotary=rotary,
        interleaved=draw(maybe()),
        rotary_seqlens=bool(rotary) and draw(maybe()),
        causal=draw(maybe()),
        window_size=draw(st.sampled_from(((-1, -1), (3, -1), (-1, 2), (2, 1), (0, 0)))),
        softcap=draw(st.sampled_from((0.0, 0.0, 2.0))),
        softmax_scale=draw(st.sampled_from((None, 0.4))),
        alibi=draw(st.sampled_from((0, 1, 2))),
        sinks=draw(st.sampled_from(("", "s_aux", "sinks"))),
        chunk=draw(st.sampled_from((0, 0, 4))),
        num_splits=draw(st.sampled_from((0, 1, 3))),
        descale=draw(st.sampled_from(descales)),
        lse=draw(maybe()),
        table_name=draw(st.sampled_from(("block_table", "page_table"))),
        padding_rows=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 2**16)),
    )


@given(call=cached_calls())
def test_flash_attn_with_kvcache_equals_the_oracle_with_every_argument(call, device):
    call.check(device)
