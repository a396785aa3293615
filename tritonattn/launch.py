"""Call, Plan and KernelConfig to grid, scratch and launch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from . import binaries, device
from .arguments import bytes_if_fp8, dequantise, pages, rows
from .call import Call
from .kernels.attention import Masking, Scoring, attention_kernel
from .kernels.spec import Spec
from .kernels.tiles import Batch, Output, Table
from .merge import merge_partials
from .plan import Plan, plan
from .problem import Problem
from .tuning.config import KernelConfig, blocks, whole_block
from .tuning.store import forced, lookup

_NO_LIMIT = 1 << 30  # a window side this long limits nothing; longer ones would overflow int32


@dataclass(slots=True)
class Ready:
    """What every call of one kind shares: worked out at its first, looked up at the others."""

    gpu: device.Device
    plan: Plan
    config: KernelConfig
    options: binaries.Options
    spec: dict[str, Spec]
    programs_per_tile: int
    block_q: int
    binary: dict[int, object] = field(default_factory=dict)


_ready: dict[tuple, Ready] = {}
_READY_LIMIT = 4096


def attend(call: Call, problem: Problem) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Run a validated call."""
    q = call.q
    ready = _get_ready(call, problem)
    total_q, heads, _ = q.shape
    out = call.out
    if out is None:
        out = q.new_empty((total_q, heads, problem.head_dim_v))
    lse = call.lse
    if call.return_lse and lse is None:
        lse = q.new_empty((heads, total_q), dtype=torch.float32)
    splits = ready.plan.num_splits
    target, target_lse = out, lse
    if splits > 1:
        target = q.new_empty((splits, total_q, heads, problem.head_dim_v), dtype=torch.float32)
        target_lse = q.new_empty((splits, heads, total_q), dtype=torch.float32)
    args = arguments(call, problem, ready.plan, ready.config, target, target_lse)
    tiles = problem.batch
    if call.cu_seqlens_q is not None:
        tiles += total_q // ready.block_q + 1
    binaries.launch(
        attention_kernel, tiles * ready.programs_per_tile, args, ready.spec, ready.options,
        ready.gpu, q.device, ready.binary,
    )  # fmt: skip
    if splits > 1 and target_lse is not None:
        merge_partials(target, target_lse, out, lse, ready.gpu)
    return out if lse is None else (out, lse)


def forget() -> None:
    """Look everything up again at the next call: for whoever changes tables or configurations."""
    _ready.clear()


def _get_ready(call: Call, problem: Problem) -> Ready:
    q, k, v, k_cache, v_cache, out = call.q, call.k, call.v, call.k_cache, call.v_cache, call.out
    starts = q.data_ptr()
    if k is not None and v is not None:
        starts |= k.data_ptr() | v.data_ptr()
    if k_cache is not None and v_cache is not None:
        starts |= k_cache.data_ptr() | v_cache.data_ptr()
    if out is not None:
        starts |= out.data_ptr()
    aligned = problem.rows_aligned and starts % 16 == 0
    key = (problem, q.device, call.return_lse, out is None, aligned, forced())
    ready = _ready.get(key)
    if ready is None:
        gpu = device.describe(q.device)
        plan_ = plan(problem, gpu)
        config = lookup(problem, gpu)
        has_lse = call.return_lse or plan_.num_splits > 1
        if plan_.num_splits > 1:  # partial results in float32, packed
            aligned &= problem.head_dim_v % 4 == 0
        elif out is None:
            aligned &= problem.head_dim_v * problem.dtype.itemsize % 16 == 0
        spec = make_spec(problem, config, gpu, has_lse, aligned)
        if len(_ready) >= _READY_LIMIT:
            _ready.clear()
        ready = _ready[key] = Ready(
            gpu,
            plan_,
            config,
            binaries.Options(config.num_warps, config.num_stages),
            {"SPEC": spec},
            plan_.num_splits * problem.num_kv_heads * -(-problem.group // config.pack),
            config.block_m // config.pack,
        )
    return ready


def arguments(
    call: Call,
    problem: Problem,
    plan_: Plan,
    config: KernelConfig,
    target: torch.Tensor,
    target_lse: torch.Tensor | None,
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
    masking = Masking(
        _limit(left), _limit(right), _limit(call.chunk_size),
        tree, *((0, 0, 0) if tree is None else (*tree.stride(), tree.shape[1])),
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
    split_stride, lse_split = 0, 0
    if target.dim() == 4 and target_lse is not None:
        split_stride, lse_split = target.stride(0), target_lse.stride(0)
    output = Output(
        target, split_stride, target.stride(-3), target.stride(-2),
        target_lse, lse_split, 0 if target_lse is None else target_lse.stride(-2),
    )  # fmt: skip
    return (
        rows(call.q), k, v, k_cache, v_cache,
        dequantise(call.k_scale), dequantise(call.v_scale), table, batch, scoring, masking, output,
        problem.num_kv_heads, plan_.num_splits, -(-plan_.split_keys // config.block_n),
    )  # fmt: skip


def make_spec(
    problem: Problem, config: KernelConfig, gpu: device.Device, has_lse: bool, aligned: bool
) -> Spec:
    """What selects the machine code of a problem under a configuration."""
    page = problem.page_size
    mask = problem.mask
    return Spec(
        problem.head_dim,
        problem.head_dim_v,
        *blocks(problem.head_dim),
        whole_block(problem.head_dim_v),
        config.block_m,
        config.block_n,
        problem.group,
        config.pack,
        page if page & (page - 1) == 0 and page <= 1024 else 0,
        problem.cache_format,
        gpu.has_native_e4m3,
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
        aligned,
        gpu.is_interpreter,
    )


def _limit(side: int | None) -> int:
    return _NO_LIMIT if side is None or side < 0 else min(side, _NO_LIMIT)
