"""Small calls of every public function that is an operator, and ways to run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tritonattn
from tritonattn.testing import Case, cumulative, generator, normal

E4M3 = torch.float8_e4m3fn
VARLEN, PREFIX, PAGED = "varlen_attention", "prefix_attention", "paged_attention"
small: dict[str, Any] = {"heads": (4, 2), "head_dims": (16, 24), "page_size": 4}

# Between them, every option of the three functions, and every form that an option may have.
CASES = [
    Case(VARLEN, k_lens=(5, 9), q_lens=(5, 3), **small),
    Case(
        VARLEN, k_lens=(5, 9), q_lens=(3, 2), layout="fused", alibi=1, query_scale=True,
        out="sliced", kv_scale="[Hkv]", options={"window_size": (None, 2), "causal": False},
        **small,
    ),
    Case(
        PREFIX, k_lens=(5, 9), q_lens=(5, 3), alibi=2, sinks=True, kv_scale="[B, Hkv]",
        max_seqlens=True, padding_rows=2,
        options={"window_size": (3, None), "softcap": 5.0, "return_lse": True, "num_splits": 3},
        **small,
    ),
    Case(
        PREFIX, k_lens=(5, 9), q_lens=(2, 3), table="flat", tree_mask=True, kv_scale="[1]",
        out="float32", options={"return_lse": True}, **small,
    ),
    Case(
        PAGED, k_lens=(5, -1), kv_scale="float", table="int64", pool_layout="interleaved",
        options={
            "window_size": (-1, None), "chunk_size": 7, "batch_invariant": True, "softmax_scale": 1,
        },
        **small,
    ),
    Case(
        PAGED, k_lens=(5, 9), q_lens=(3, 2), cache_dtype=E4M3, kv_scale="[]", table="flat",
        pool_layout="fused", options={"softmax_scale": -0.5, "softcap": 2}, **small,
    ),
]  # fmt: skip


def merge_call(device: Any = "cpu") -> tuple[tuple[Any, ...], dict[str, Any]]:
    how: dict[str, Any] = {"dtype": torch.float32, "generator": generator(0), "device": device}
    return ([normal(3, 4, 16, **how) for _ in range(2)], normal(2, 4, 3, **how)), {}


def write_call(device: Any = "cpu") -> tuple[tuple[Any, ...], dict[str, Any]]:
    how: dict[str, Any] = {"dtype": torch.float16, "generator": generator(1), "device": device}
    k, v = normal(3, 2, 16, **how), normal(3, 2, 24, **how)
    caches = [torch.zeros(4, 4, 2, dim, device=device).to(E4M3) for dim in (16, 24)]
    slots = torch.tensor([3, -1, 14], device=device)
    return (k, v, *caches, slots), {"k_scale": 0.5, "v_scale": torch.ones(2, device=device)}


def gather_call(device: Any = "cpu") -> tuple[tuple[Any, ...], dict[str, Any]]:
    how: dict[str, Any] = {"dtype": E4M3, "generator": generator(2), "device": device}
    caches = normal(4, 4, 2, 16, **how), normal(4, 4, 2, 24, **how)
    table = torch.tensor([[2, 0], [1, 7]], dtype=torch.int32, device=device)
    lens = torch.tensor([6, 1], dtype=torch.int32, device=device)
    options = {"cu_seqlens_k": cumulative((6, 1), device), "total_k": 8}
    return (*caches, table, lens), options | {"v_scale": 2.0, "out_dtype": torch.float32}


def copy_call(device: Any = "cpu") -> tuple[tuple[Any, ...], dict[str, Any]]:
    caches = [torch.arange(8.0, device=device).view(4, 2), torch.arange(12, device=device)]
    return (caches, torch.tensor([[0, 2], [2, 3]], device=device)), {}


def swap_call(device: Any = "cpu") -> tuple[tuple[Any, ...], dict[str, Any]]:
    source = torch.arange(8.0, device=device).view(4, 2)
    pairs = torch.tensor([[3, 0], [0, 1]], device=device)
    return (source, torch.zeros(2, 2, device=device), pairs), {}


def decode_step(
    q: Tensor, k: Tensor, v: Tensor, caches: Any, slots: Tensor, *where: Tensor, **options: Any
) -> Tensor:
    """Two layers: each writes new keys, then attends to the cache they are in."""
    for _ in range(2):
        tritonattn.write_kv_cache(k, v, *caches, slots)
        q = tritonattn.paged_attention(q, *caches, *where, **options)
        k, v = v, k
    return q


def decode_inputs(batch: int, pages: int, columns: int, device: Any = "cpu") -> list[Any]:
    """q, k, v, a pool of keys and values, and where a new token goes behind the one cached."""
    how: dict[str, Any] = {"dtype": torch.float32, "generator": generator(batch)}
    q, k, v = (normal(batch, heads, 16, **how) for heads in (4, 2, 2))
    pool = normal(pages, 2, 4, 2, 16, **how)
    table = torch.zeros(batch, columns, dtype=torch.int32)
    table[:, 0] = torch.arange(batch) * 2 % pages
    slots, lens = table[:, 0].long() * 4 + 1, torch.full((batch,), 2, dtype=torch.int32)
    return [x.to(device) for x in (q, k, v, pool, slots, table, lens)]


Build = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]
CALLS: list[tuple[str, Build]] = [
    *((case.function, case.build) for case in CASES),
    ("merge_states", merge_call),
    ("write_kv_cache", write_call),
    ("gather_kv_cache", gather_call),
    ("copy_blocks", copy_call),
    ("swap_blocks", swap_call),
]
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(CALLS)]


def public(name: str) -> Callable[..., Any]:
    return getattr(tritonattn, name)


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of arguments or results, in order."""
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def assert_same_bits(actual: Any, expected: Any) -> None:
    pairs = list(zip(tensors(actual), tensors(expected), strict=True))
    for a, e in pairs:
        assert (a.shape, a.stride(), a.dtype) == (e.shape, e.stride(), e.dtype)
        a, e = (x.flatten().cpu().view(torch.uint8) for x in (a, e))
        assert torch.equal(a, e)


def as_fake(tree: Any, mode: FakeTensorMode, device: Any = "cpu") -> Any:
    def fake(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        with mode:
            # Strided like x, on a device that need not be there.
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    return torch.utils._pytree.tree_map(fake, tree)
