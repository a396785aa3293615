"""Call, Plan and KernelConfig to grid, scratch and launch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import binaries, device, validate
from .arguments import bytes_if_fp8, dequantise, output, pages, partials, rows
from .call import Call
from .kernels.attention import Masking, Scoring, attention_kernel
from .kernels.spec import Spec
from .kernels.splits import Splits
from .kernels.tiles import Batch, Table
from .merge import merge_partials
from .plan import Plan, plan
from .problem import Problem
from .scratch import take
from .tuning.config import KernelConfig, blocks, whole_block
from .tuning.store import forced, lookup

_NO_LIMIT = 1 << 30  # a window side this long limits nothing; longer ones would overflow int32


# What may be a tensor, in the order in which ``arguments`` takes it.
_INPUTS = (
    "q", "k", "v", "k_cache", "v_cache", "k_scale", "v_scale", "block_table", "block_indptr",
    "cu_seqlens_q", "cu_seqlens_k", "context_lens", "seq_lens", "query_scale", "alibi_slopes",
    "sinks", "tree_mask",
)  # fmt: skip


@dataclass(slots=True)
class Ready:
    """What calls with the same Problem share: worked out at the first, looked up at the others."""

    gpu: device.Device
    plan: Plan
    config: KernelConfig
    spec: Spec


@dataclass(slots=True)
class Repeats:
    """What calls that differ in addresses alone launch."""

    inputs: Callable[[Call], tuple[torch.Tensor, ...]]  # those that are given, in their order
    attention: binaries.Repeat
    merge: binaries.Repeat | None
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    offsets: list[int]  # of the partial results in their scratch, in bytes
    scratch: int  # its size, in float32


class Partial(NamedTuple):
    """``[parts, tokens, heads, dim]``, ``[parts, heads, tokens]`` and ``[heads, tokens]``."""

    out: torch.Tensor
    lse: torch.Tensor
    counts: torch.Tensor


_ready: dict[tuple, Ready] = {}
_READY_LIMIT = 4096


def attend(call: Call, problem: Problem) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Run a validated call."""
    key = (_is_aligned(call, problem), forced())
    repeats = call.repeats.get(key) if call.repeats is not None else None
    if repeats is None:
        return _first(call, problem, key)
    out = call.out
    if out is None:
        out = call.q.new_empty(repeats.out_shape)
    lse = call.lse
    if lse is None and call.return_lse:
        lse = call.q.new_empty(repeats.lse_shape, dtype=torch.float32)
    addresses = [x.data_ptr() for x in repeats.inputs(call)]
    results = [out.data_ptr()]
    if lse is not None:
        results.append(lse.data_ptr())
    if repeats.merge is None:
        repeats.attention(*addresses, *results)
    else:
        scratch = take(call.q, repeats.scratch, shared=not call.is_operator)
        start = scratch.data_ptr()
        parts = [start + offset for offset in repeats.offsets]
        repeats.attention(*addresses, *results, *parts)
        repeats.merge(*parts, *results)
    return out if lse is None else (out, lse)


def forget() -> None:
    """Look everything up again at the next call: for whoever changes tables or configurations."""
    _ready.clear()
    validate.forget()


def _first(
    call: Call, problem: Problem, key: tuple
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Run a call, and keep what others of its kind can repeat under ``key``."""
    q = call.q
    ready = _get_ready(call, problem, *key)
    config = ready.config
    total_q, heads, _ = q.shape
    shape, lse_shape = (total_q, heads, problem.head_dim_v), (heads, total_q)
    out = call.out
    if out is None:
        out = q.new_empty(shape)
    lse = call.lse
    if lse is None and call.return_lse:
        lse = q.new_empty(lse_shape, dtype=torch.float32)
    parts = ready.plan.num_splits
    partial = _partial(call, parts, shape) if parts > 1 else None
    args = arguments(call, problem, ready.plan, config, out, lse, partial)
    tiles = problem.batch
    if call.cu_seqlens_q is not None:
        tiles += total_q // (config.block_m // config.pack) + 1
    programs_per_tile = problem.num_kv_heads * -(-problem.group // config.pack)
    attention = binaries.launch(
        attention_kernel, tiles * programs_per_tile * parts, args,
        {"SPEC": ready.spec}, binaries.Options(config.num_warps, config.num_stages), ready.gpu,
        q.device,
    )  # fmt: skip
    merge = None
    if partial is not None:
        merge = merge_partials(partial.out, partial.lse, out, lse, ready.gpu, partial.counts)
    if attention is not None and call.repeats is not None:
        names = [name for name in _INPUTS if isinstance(getattr(call, name), torch.Tensor)]
        inputs, repeat = operator.attrgetter(*names), binaries.Repeat(attention)
        given = [x.data_ptr() for x in (*inputs(call), out, lse, *(partial or ())) if x is not None]
        # Not so where an argument had to be copied into another layout.
        if repeat.addresses == given:
            offsets = [x.data_ptr() - partial.out.data_ptr() for x in partial] if partial else []
            call.repeats[key] = Repeats(
                inputs, repeat, None if merge is None else binaries.Repeat(merge),
                shape, lse_shape, offsets, sum(x.numel() for x in partial or ()),
            )  # fmt: skip
    return out if lse is None else (out, lse)


def _partial(call: Call, parts: int, shape: tuple[int, int, int]) -> Partial:
    tokens, heads, dim = shape
    sizes = parts * tokens * heads * dim, parts * tokens * heads, tokens * heads
    scratch = take(call.q, sum(sizes), shared=not call.is_operator)
    out, lse, counts = scratch[: sum(sizes)].split(sizes)
    return Partial(
        out.view(parts, tokens, heads, dim), lse.view(parts, heads, tokens),
        counts.view(torch.int32).view(heads, tokens),
    )  # fmt: skip


def _is_aligned(call: Call, problem: Problem) -> bool:
    """Whether all rows that are read or written start on 16 bytes."""
    k, v, k_cache, v_cache, out = call.k, call.v, call.k_cache, call.v_cache, call.out
    starts = call.q.data_ptr()
    if k is not None and v is not None:
        starts |= k.data_ptr() | v.data_ptr()
    if k_cache is not None and v_cache is not None:
        starts |= k_cache.data_ptr() | v_cache.data_ptr()
    if out is not None:
        starts |= out.data_ptr()
    return problem.rows_aligned and starts % 16 == 0


def _get_ready(call: Call, problem: Problem, aligned: bool, config: KernelConfig | None) -> Ready:
    key = (problem, call.q.device, call.return_lse, call.out is None, aligned, config)
    ready = _ready.get(key)
    if ready is None:
        gpu = device.describe(call.q.device)
        plan_ = plan(problem, gpu)
        found = lookup(problem, gpu)
        if plan_.num_splits > 1:  # partial results in float32, packed
            aligned &= problem.head_dim_v % 4 == 0
        if call.out is None:
            aligned &= problem.head_dim_v * problem.dtype.itemsize % 16 == 0
        spec = make_spec(problem, plan_, found, gpu, call.return_lse, aligned)
        if len(_ready) >= _READY_LIMIT:
            _ready.clear()
        ready = _ready[key] = Ready(gpu, plan_, found, spec)
    return ready


def arguments(
    call: Call,
    problem: Problem,
    plan_: Plan,
    config: KernelConfig,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    partial: Partial | None,
) -> tuple:
    """The attention kernel's run-time arguments, in its order."""
    k = v = k_cache = v_cache = table = None
    if call.k is not None and call.v is not None:
        k, v = rows(call.k), rows(call.v)
    if call.k_cache is not None and call.v_cache is not None:
        k_cache, v_cache = pages(bytes_if_fp8(call.k_cache)), pages(bytes_if_fp8(call.v_cache))
    if call.block_table is not None:
        ids = call.block_table
        stride_seq = ids.stride(0) if ids.dim() == 2 else 0
        table = Table(ids, call.block_indptr, stride_seq, problem.page_size)
    lens = call.cu_seqlens_k
    if lens is None:
        lens = call.context_lens if call.context_lens is not None else call.seq_lens
    assert lens is not None
    batch = Batch(call.cu_seqlens_q, lens, problem.batch, problem.total_q)
    left, right = call.window_size or (None, None)
    if problem.mask.causal and not problem.mask.has_tree:
        right = 0
    tree = None if call.tree_mask is None else call.tree_mask.view(torch.uint8)
    reach = _limit(left), _limit(right), _limit(call.chunk_size)
    masking = Masking(
        *reach, tree, *((0, 0, 0) if tree is None else (*tree.stride(), tree.shape[1])),
    )  # fmt: skip
    alibi, sinks = call.alibi_slopes, call.sinks
    stride_alibi = (0, 0)
    if alibi is not None:
        stride_alibi = (alibi.stride(0) if alibi.dim() == 2 else 0, alibi.stride(-1))
    scoring = Scoring(
        float(problem.head_dim**-0.5 if call.softmax_scale is None else call.softmax_scale),
        float(call.softcap),
        None if call.query_scale is None else call.query_scale.contiguous(),
        alibi,
        *stride_alibi,
        sinks,
        0 if sinks is None else sinks.stride(0),
    )
    splits = None
    if partial is not None:
        splits = Splits(
            plan_.num_splits, -(-plan_.split_keys // config.block_n), plan_.programs,
            -(-plan_.least_keys // config.block_n), _widest(*reach, config.block_m // config.pack),
        )  # fmt: skip
    return (
        rows(call.q), k, v, k_cache, v_cache,
        dequantise(call.k_scale), dequantise(call.v_scale), table, batch, scoring, masking,
        output(out, lse), None if partial is None else partials(*partial), splits,
        problem.num_kv_heads,
    )  # fmt: skip


def _widest(left: int, right: int, chunk: int, queries: int) -> int:
    """About how many keys ``queries`` neighbours can see, however many there are."""
    return min(left + right, chunk, _NO_LIMIT) + queries


def make_spec(
    problem: Problem,
    plan_: Plan,
    config: KernelConfig,
    gpu: device.Device,
    has_lse: bool,
    aligned: bool,
) -> Spec:
    """What selects the machine code of a problem under a configuration."""
    page = problem.page_size
    mask = problem.mask
    return Spec(
        problem.head_dim,
        problem.head_dim_v,
        blocks(problem.head_dim, problem.dtype, gpu),
        whole_block(problem.head_dim_v),
        config.block_m,
        config.block_n,
        config.form,
        problem.group,
        config.pack,
        page if page & (page - 1) == 0 and page <= 1024 else 0,
        problem.cache_format,
        gpu.has_native_e4m3,
        # Beside new keys the queries are there in both formats, for which RDNA has no registers.
        problem.cache_format != ""
        and problem.dtype == torch.bfloat16
        and not (problem.has_new and gpu.backend == "hip"),
        problem.has_cache,
        problem.has_new,
        mask.has_left,
        mask.has_right,
        mask.has_chunk,
        mask.has_tree,
        problem.has_softcap,
        problem.has_alibi,
        problem.has_sinks,
        problem.has_query_scale,
        has_lse,
        plan_.num_splits > 1,
        aligned,
        gpu.is_interpreter,
    )


def _limit(side: int | None) -> int:
    return _NO_LIMIT if side is None or side < 0 else min(side, _NO_LIMIT)
