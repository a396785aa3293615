"""A task's tensors: as large as in serving, and small ones whose results can be checked."""

from __future__ import annotations

from typing import Any

import torch

from ..case import Case
from ..device import Device
from ..inputs import TENSORS, cumulative
from ..plan import plan
from .tasks import Task

MOST_BYTES = 4 << 30  # of a cache

CallTensors = tuple[tuple[Any, ...], dict[str, Any]]  # positional arguments and options


def small_case(task: Task, device: Device) -> Case:
    """The task's binary at small odd lengths: several tiles, sequences of one token, splits.

    What no visible key owns is NaN.
    """
    layer = task.layer
    cached = {"prefill": (37, 1, 300), "prefix": (70, 0, 300)}.get(task.family, (37, 1, 333))
    queries = {"prefill": (37, 1, 300), "prefix": (33, 1, 140), "paged": (1, 1, 150)}
    options = dict(task.scalars)
    if "window_size" in options:
        options["window_size"] = (min(layer.window - 1, 50), 0)
    if "chunk_size" in options:
        options["chunk_size"] = min(layer.chunk, 64)
    cut = plan(task.problem, device).cut
    if cut != "shares":  # as so few queries would be
        options["num_splits"] = 3 if cut else 1
    return Case(
        task.function, cached, queries.get(task.family),
        heads=(layer.num_heads, layer.num_kv_heads), head_dims=(layer.head_dim, layer.value_dim),
        dtype=task.dtype, cache_dtype=task.cache_dtype if task.family != "prefill" else None,
        page_size=task.page_size, pool_layout="latent" if task.problem.is_latent else "token_major",
        alibi=int(layer.alibi), sinks=layer.sinks,
        query_scale=layer.query_scale, options=options,
        option_dtype=task.dtype if layer.sinks else torch.float32, poison="nan",
    )  # fmt: skip


def build(task: Task, where: torch.device) -> CallTensors:
    """A task's call with random tensors on ``where``; its pages lie in random order."""
    layer, function = task.layer, task.function
    how: dict[str, Any] = {"device": where}
    total_q, batch = sum(task.q_lens), len(task.q_lens)

    def rows(*shape: int, dtype: torch.dtype = task.dtype) -> torch.Tensor:
        if dtype.itemsize > 1:
            return torch.randn(shape, dtype=dtype, **how)
        # By parts, as the values are drawn in a wider type.
        x = torch.empty(shape, dtype=dtype, **how)
        for part in x.view(-1).split(1 << 24):
            part.copy_(torch.randn(part.shape, dtype=torch.float16, **how))
        return x

    q = rows(total_q, layer.num_heads, layer.head_dim)
    lengths = _lengths(task, where)
    options: dict[str, Any] = {**task.scalars, **task.max_seqlens}
    options["out"] = torch.empty(total_q, layer.num_heads, layer.value_dim, dtype=q.dtype, **how)
    total_k = sum(task.k_lens) if task.family == "prefill" else total_q
    new: tuple[torch.Tensor, ...] = ()
    if task.family in ("prefill", "prefix"):
        new = (
            rows(total_k, layer.num_kv_heads, layer.head_dim),
            rows(total_k, layer.num_kv_heads, layer.value_dim),
        )
    cache: tuple[torch.Tensor, ...] = ()
    if task.family != "prefill":
        stored, entries = task.cache_dtype or task.dtype, batch * task.table_width
        is_latent = task.problem.is_latent
        dims = layer.head_dim if is_latent else layer.head_dim + layer.value_dim
        row = layer.num_kv_heads * dims * stored.itemsize
        # Much more than the L2 cache is enough: beyond it sequences share pages.
        most = max(task.table_width, MOST_BYTES // (row * task.page_size))
        pages = min(entries, most)
        pool = (pages, task.page_size, layer.num_kv_heads)
        count = max(1, -(-entries // most))
        orders = [torch.randperm(pages, **how).int() for _ in range(count)]
        ids = torch.cat(orders)[:entries].view(batch, task.table_width)
        keys = rows(*pool, layer.head_dim, dtype=stored)
        values = keys[..., : layer.value_dim]
        if not is_latent:
            values = rows(*pool, layer.value_dim, dtype=stored)
        cache = (keys, values, ids)
    if layer.alibi:
        options["alibi_slopes"] = torch.rand(layer.num_heads, **how)
    if layer.sinks:
        options["sinks"] = rows(layer.num_heads)
    if layer.query_scale:
        options["query_scale"] = torch.rand(total_q, **how) + 0.5
    if task.family == "paged":
        options["cu_seqlens_q"] = lengths["cu_seqlens_q"]
    ends = [lengths[name] for name in TENSORS[function] if name in lengths]
    return (q, *new, *cache, *ends), options


def with_lengths(call: CallTensors, task: Task, turn: int = 0) -> CallTensors:
    """The call on the same tensors with the lengths of ``task``, a situation of its task.

    Each ``turn`` gives cached lengths to other sequences, so that calls read other pages: the keys
    of short sequences would stay in the L2 cache.
    """
    args, options = call
    lengths = _lengths(task, args[0].device, turn)
    names = TENSORS[task.function]
    changed = [lengths.get(name, x) for name, x in zip(names, args, strict=True)]
    return tuple(changed), {name: lengths.get(name, x) for name, x in options.items()}


def _lengths(task: Task, where: torch.device, turn: int = 0) -> dict[str, torch.Tensor]:
    """By argument."""
    starts = cumulative(task.q_lens).to(where)
    if task.family == "prefill":
        return {"cu_seqlens_q": starts, "cu_seqlens_k": cumulative(task.k_lens).to(where)}
    lens = torch.tensor(task.cached_lens, dtype=torch.int32, device=where)
    if task.is_mixed:
        lens = lens.roll(turn)
    return {"cu_seqlens_q": starts, "context_lens": lens, "seq_lens": lens}


def named(function: str, call: CallTensors) -> dict[str, Any]:
    """All arguments by name."""
    args, options = call
    return dict(zip(TENSORS[function], args, strict=True)) | options
