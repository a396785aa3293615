"""Inputs for tests and benchmarks: packed rows, paged pools of any layout, poison.

Everything is drawn on the CPU from a seed, so that a seed means the same values on every device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference
from .call import Call

Device = torch.device | str

PACKED_LAYOUTS = ("contiguous", "head_major", "sliced", "fused")
POOL_LAYOUTS = ("token_major", "head_major", "interleaved", "fused", "sliced")
SCALE_SHAPES = ("float", "[]", "[1]", "[Hkv]", "[B, Hkv]")
TENSORS = {  # the positional arguments
    "varlen_attention": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
    "prefix_attention": (
        "q", "k", "v", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "context_lens"
    ),
    "paged_attention": ("q", "k_cache", "v_cache", "block_table", "seq_lens"),
}  # fmt: skip
FP8_NAN_INF = {
    torch.float8_e4m3fn: (0x7F, 0x7F),  # this format has no Inf
    torch.float8_e5m2: (0x7F, 0x7C),
    torch.float8_e4m3fnuz: (0x80, 0x80),
    torch.float8_e5m2fnuz: (0x80, 0x80),
}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(
    *shape: int, dtype: torch.dtype, generator: torch.Generator, device: Device = "cpu"
) -> Tensor:
    """Standard normal values, rounded to ``dtype``, float8 included."""
    return reference.quantise(torch.randn(shape, generator=generator), dtype).to(device)


def packed_rows(n: int, heads: int, dim: int, layout: str = "contiguous", **how: Any) -> Tensor:
    """``[n, heads, dim]`` as a view with one of PACKED_LAYOUTS; ``how`` is for ``normal``."""
    if layout == "head_major":
        return normal(heads, n, dim, **how).transpose(0, 1)
    if layout in ("sliced", "fused"):
        return normal(n + 2, heads + 1, dim + 3, **how)[1 : n + 1, :heads, 3:]
    return normal(n, heads, dim, **how)


def packed_keys(
    n: int, heads: int, dim: int, dim_v: int, layout: str = "contiguous", **how: Any
) -> tuple[Tensor, Tensor]:
    """``k [n, heads, dim]`` and ``v [n, heads, dim_v]``; "fused": halves of the same rows."""
    if layout == "fused":
        k, v = normal(n, heads, dim + dim_v, **how).split([dim, dim_v], dim=-1)
        return k, v
    return packed_rows(n, heads, dim, layout, **how), packed_rows(n, heads, dim_v, layout, **how)


def kv_pool(
    num_pages: int,
    page_size: int,
    heads: int,
    dim: int,
    dim_v: int,
    layout: str = "token_major",
    **how: Any,
) -> tuple[Tensor, Tensor]:
    """``k_cache`` and ``v_cache`` as views with one of POOL_LAYOUTS; ``how`` is for ``normal``.

    Or "latent": the values are the keys' first dims, in the same memory, so no cache to write to.
    """
    shape = (num_pages, page_size, heads)
    if layout == "latent":
        k = normal(*shape, dim, **how)
        return k, k[..., :dim_v]
    if layout == "interleaved" and dim == dim_v:
        k, v = normal(num_pages, 2, page_size, heads, dim, **how).unbind(1)
        return k, v
    if layout in ("fused", "interleaved"):  # K and V of a token side by side
        k, v = normal(*shape, dim + dim_v, **how).split([dim, dim_v], dim=-1)
        return k, v
    return _pool(*shape, dim, layout, **how), _pool(*shape, dim_v, layout, **how)


def _pool(pages: int, size: int, heads: int, dim: int, layout: str, **how: Any) -> Tensor:
    if layout == "head_major":
        return normal(pages, heads, size, dim, **how).transpose(1, 2)
    if layout == "sliced":  # a part of a pool that also serves other layers and heads
        return normal(pages + 2, size + 1, heads + 1, dim + 3, **how)[1:-1, :size, 1:, :dim]
    return normal(pages, size, heads, dim, **how)


def block_table(
    lengths: tuple[int, ...],
    page_size: int,
    *,
    generator: torch.Generator,
    spare_columns: int = 2,
    spare_pages: int = 3,
    dtype: torch.dtype = torch.int32,
    device: Device = "cpu",
) -> tuple[Tensor, int]:
    """Shuffled page ids ``[B, max_pages]`` for sequences of these lengths, and the pool's size.

    Each page belongs to one sequence at most; entries past a length are 0.
    """
    counts = [-(-max(0, n) // page_size) for n in lengths]
    num_pages = sum(counts) + spare_pages
    ids = torch.randperm(num_pages, generator=generator).to(dtype)
    table = torch.zeros(len(lengths), max(counts, default=0) + spare_columns, dtype=dtype)
    for row, pages in zip(table, ids[: sum(counts)].split(counts), strict=True):
        row[: len(pages)] = pages
    return table.to(device), num_pages


# Where keys lie, and what lies elsewhere


class _Keys(NamedTuple):
    """Some keys of one sequence: token ``j[i]`` is ``k[place][i]`` with value ``v[place][i]``."""

    k: Tensor
    v: Tensor
    place: tuple[Tensor, ...]
    j: Tensor


def _sequences(call: Any) -> Iterator[tuple[slice, int, list[_Keys]]]:
    """Of each sequence: its rows of q, how many keys it has, and where they are."""
    device, cu_k = call.q.device, call.cu_seqlens_k
    if cu_k is not None:
        lengths = (cu_k[1:] - cu_k[:-1]).tolist()
    else:
        lengths = (call.seq_lens if call.context_lens is None else call.context_lens).tolist()
    edges = range(len(lengths) + 1) if call.cu_seqlens_q is None else call.cu_seqlens_q.tolist()
    for b, length in enumerate(lengths):
        rows = slice(edges[b], max(edges[b], edges[b + 1]))
        j = torch.arange(max(0, length), device=device)
        if cu_k is not None:
            yield rows, len(j), [_Keys(call.k, call.v, (cu_k[b] + j,), j)]
            continue
        pages, page_size = _pages(call, b), call.k_cache.shape[1]
        slots = (pages[j // page_size].long(), j % page_size)
        keys = [_Keys(call.k_cache, call.v_cache, slots, j)]
        if call.k is not None:
            new = torch.arange(rows.stop - rows.start, device=device)
            keys.append(_Keys(call.k, call.v, (rows.start + new,), len(j) + new))
        yield rows, sum(len(part.j) for part in keys), keys


def _pages(call: Any, b: int) -> Tensor:
    """Sequence b's entries of the block table, those past its length included."""
    if call.block_indptr is None:
        return call.block_table[b]
    return call.block_table[int(call.block_indptr[b]) : int(call.block_indptr[b + 1])]


def poison(
    function: str, args: tuple[Any, ...], options: dict[str, Any], value: float = math.nan
) -> None:
    """Fill, in place, whatever the result must not depend on; ``value`` is NaN or Inf.

    That is every byte of the storages of q, k, v and the caches (pools that they are views of
    included) that is no query of a sequence and no key or value that some row sees, and, as ids of
    pages that do not exist, the block-table entries past each length.
    """
    call = _as_call(function, args, options)
    tensors = [
        _bytes(x) for x in (call.q, call.k, call.v, call.k_cache, call.v_cache) if x is not None
    ]
    owned = {}
    for x in tensors:
        flat = x.new_empty(0).set_(x.untyped_storage())
        owned[_storage(x)] = flat, torch.zeros_like(flat, dtype=torch.bool)
    for rows, lk, keys in _sequences(call):
        _mark(owned, call.q, rows)
        tree = None if call.tree_mask is None else call.tree_mask[rows]
        rule = (call.causal, call.window_size, call.chunk_size, tree)
        lq = rows.stop - rows.start
        seen = reference.visible(lq, lk, *rule, device=call.q.device).any(0)
        for part in keys:
            index = tuple(i[seen[part.j]] for i in part.place)
            _mark(owned, part.k, index)
            _mark(owned, part.v, index)
    for flat, mask in owned.values():
        filler = value
        if flat.dtype == torch.uint8:
            filler = FP8_NAN_INF[call.k_cache.dtype][math.isinf(value)]
        flat.masked_fill_(~mask, filler)
    if call.block_table is not None:
        for b, (_, _, keys) in enumerate(_sequences(call)):
            past = _pages(call, b)[-(-len(keys[0].j) // call.k_cache.shape[1]) :]
            past[0::2], past[1::2] = 10**6, -1


def probe(function: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Set q to 0 and the value of key j to the unit vector e_j (j modulo Dv), in place.

    Where the options leave all weights equal, ``out[i, h, j]`` is then 1/n for each of the n keys
    that row i sees, and lse is ln n: one run shows the whole mask.
    """
    call = _as_call(function, args, options)
    call.q.zero_()
    for _, _, keys in _sequences(call):
        for part in keys:
            dim_v = part.v.shape[-1]
            unit = torch.eye(dim_v, device=part.v.device)[part.j % dim_v][:, None]
            unit = unit.to(part.v.dtype).expand(-1, part.v.shape[-2], -1)
            _bytes(part.v)[part.place] = _bytes(unit)


def _as_call(function: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return Call(function, **dict(zip(TENSORS[function], args, strict=True)), **options)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype in FP8_NAN_INF else x


def _storage(x: Tensor) -> tuple[int, int]:
    return x.untyped_storage().data_ptr(), x.dtype.itemsize


def _mark(owned: dict[tuple[int, int], tuple[Tensor, Tensor]], x: Tensor, index: Any) -> None:
    mask = owned[_storage(x)][1]
    mask.as_strided(x.shape, x.stride(), x.storage_offset())[index] = True


# Whole calls


def cumulative(lengths: Sequence[int], device: Device = "cpu") -> Tensor:
    """``cu_seqlens`` int32 [B + 1] of these lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
