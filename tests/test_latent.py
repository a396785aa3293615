"""Values that are their keys' first dims, in the same memory: a tile of both is loaded once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonattn
from tritonattn import device as devices
from tritonattn import launch
from tritonattn.call import Call
from tritonattn.inputs import TENSORS
from tritonattn.strategies import OPTIONS, paged_cases
from tritonattn.testing import Case, check, same_bytes
from tritonattn.tuning import models, space
from tritonattn.tuning.config import KernelConfig, reads_values_as_keys, shared_memory
from tritonattn.tuning.heuristics import heuristic
from tritonattn.tuning.store import force
from tritonattn.tuning.tasks import Shape, Task
from tritonattn.validate import validate

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
fp16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
SMALL: dict[str, Any] = {
    "heads": (4, 1), "head_dims": (48, 32), "dtype": bf16, "page_size": 8, "pool_layout": "latent",
    "poison": "nan",
}  # fmt: skip
DECODE = Case("paged_attention", (70, 3, 150), **SMALL)
MIXED = dataclasses.replace(DECODE, q_lens=(1, 3, 20))


def call_of(case: Case, device: Any) -> Call:
    args, options = case.build(device)
    given = dict(zip(TENSORS["paged_attention"], args, strict=True))
    return Call("paged_attention", **given, **options)


@pytest.fixture
def latent(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each launch, whether it loads values as keys."""
    found: list[bool] = []
    make_spec = launch.make_spec

    def made(*args: Any) -> Any:
        found.append((spec := make_spec(*args)).IS_LATENT)
        return spec

    monkeypatch.setattr(launch, "make_spec", made)
    launch.forget()
    return found


CHANGES: list[dict[str, Any]] = [
    {}, {"dtype": fp16}, {"cache_dtype": E4M3, "kv_scale": "[Hkv]"},
    {"cache_dtype": E5M2, "kv_scale": "[B, Hkv]"}, {"options": {"softcap": 2.0}},
    {"options": {"window_size": (9, 0)}}, {"options": {"chunk_size": 16}, "poison": "inf"},
    {"options": {"num_splits": 3, "return_lse": True}}, {"alibi": 1, "sinks": True},
    {"options": {"batch_invariant": True}}, {"kv_scale": "float", "query_scale": True},
    {"heads": (6, 2), "page_size": 12, "table": "flat"}, {"head_dims": (96, 64)},
    {"head_dims": (24, 20)}, {"head_dims": (30, 23)}, {"tree_mask": True},
]  # fmt: skip


@pytest.mark.parametrize("case", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_paged_attention_on_latent_keys_equals_the_oracle(
    case: Case, change: dict[str, Any], latent: list[bool], device: torch.device
) -> None:
    check(dataclasses.replace(case, **change), device=device)
    assert latent
    assert all(latent)


@pytest.mark.parametrize("q_lens", [None, (1, 2)], ids=["decode", "mixed"])
@pytest.mark.parametrize("cache_dtype", [None, E4M3], ids=str)
def test_paged_attention_on_latent_keys_of_576_dims_equals_the_oracle(
    q_lens: Any, cache_dtype: Any, latent: list[bool], device: torch.device
) -> None:
    """A tile that is not full, and several."""
    how = {"heads": (16, 1), "head_dims": (576, 512), "cache_dtype": cache_dtype}
    check(dataclasses.replace(DECODE, k_lens=(11, 200), q_lens=q_lens, **how), device=device)
    assert all(latent)


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 16), (16, 64), (64, 32)])
@settings(max_examples=10)
@given(data=st.data())
def test_paged_attention_on_latent_keys_equals_the_oracle_with_every_option(
    block_m: int, block_n: int, data: st.DataObject, device: torch.device
) -> None:
    """In one loop over whole tiles, and, of more rows, by kinds of tiles."""
    drawn = paged_cases(options=OPTIONS - {"layout"}, heads=((3, 1), (4, 2)),
                        head_dims=((48, 32), (24, 20)), dtypes=(fp16, bf16))  # fmt: skip
    case = dataclasses.replace(data.draw(drawn), pool_layout="latent")
    with force(KernelConfig(block_m, block_n, 2, 4, 2)):
        check(case, device=device)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("another offset", lambda k: k[..., 16:48]),
        ("another stride", lambda k: k[:, :, :1].expand(-1, -1, 2, -1)[..., :32]),
        ("other memory", lambda k: k.clone()[..., :32]),
        ("all of the keys", lambda k: k),
    ],
)
def test_paged_attention_on_other_values_reads_them_apart(
    name: str, change: Any, latent: list[bool], device: torch.device
) -> None:
    args, options = dataclasses.replace(DECODE, heads=(4, 2), poison="").build(device)
    q, k_cache, _, *rest = args
    check("paged_attention", q, k_cache, change(k_cache), *rest, **options, device=device)
    assert latent == [False]


def test_values_of_one_head_may_have_any_stride_over_heads(device: torch.device) -> None:
    call = call_of(DECODE, device)
    pool = call.k_cache[:, :, 0]
    call.v_cache = pool[..., :32].unsqueeze(2)
    assert call.v_cache.stride() != call.k_cache.stride()
    assert validate(call).is_latent


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_paged_attention_tells_latent_keys_from_others_by_address(
    order: tuple[int, int], device: torch.device
) -> None:
    """Calls that are alike but for that: what one launched is not what the other does."""
    q, k, _, *rest = dataclasses.replace(DECODE, poison="").build(device)[0]
    pools = torch.stack([k, k.flip(0)])
    launch.forget()
    for i in (*order, *order):
        values = pools[i][..., :32]
        check("paged_attention", q, pools[0], values, *rest, device=device)


def test_latent_keys_give_the_bits_that_values_of_their_own_give(device: torch.device) -> None:
    q, k, v, *rest = dataclasses.replace(MIXED, poison="").build(device)[0]
    starts = torch.tensor((0, 1, 4, 24), dtype=torch.int32, device=device)
    results = []
    for values in (v, v.clone()):
        with force(KernelConfig(16, 32, 4, 4, 2)):
            how = {"cu_seqlens_q": starts, "num_splits": 1}
            results.append(tritonattn.paged_attention(q, k, values, *rest, **how))
    assert same_bytes(*results)


LAYER = models.Layer(16, 1, 576, 512, latent=True, functions=("paged_attention",))


@pytest.mark.parametrize("arch", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("group", [16, 32, 128])
@pytest.mark.parametrize("cache_dtype", [None, E4M3], ids=str)
def test_heuristic_keeps_two_tiles_of_latent_keys_in_shared_memory(
    arch: int, group: int, cache_dtype: Any
) -> None:
    """One to be multiplied, one on its way; the tuner has that choice, and others beside it."""
    device = devices.target(arch)
    layer = dataclasses.replace(LAYER, num_heads=group)
    problem = Task(layer, "decode", Shape(32, 1, 8192), cache_dtype=cache_dtype).problem
    assert reads_values_as_keys(problem, device)
    config = heuristic(problem, device)
    has_bytes = cache_dtype is not None and not device.has_native_e4m3
    assert config.num_stages >= 3 - has_bytes
    apart = dataclasses.replace(problem, is_latent=False)
    assert shared_memory(config, problem, device) <= shared_memory(config, apart, device)
    found = space.candidates(problem, device)
    assert config in found
    assert len(found) > 2


def test_latent_call_is_compiled_by_torch_as_a_whole(device: torch.device) -> None:
    """Tracing has no addresses to compare."""
    case = dataclasses.replace(DECODE, dtype=fp16)
    (q, keys, _, table, lens), _ = case.build(device)

    def attend(q, keys, table, lens):
        return tritonattn.paged_attention(q, keys, keys[..., :32], table, lens)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, keys, table, lens), attend(q, keys, table, lens))
