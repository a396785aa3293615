"""Call, Plan and KernelConfig to grid, scratch and launch."""

from __future__ import annotations

import torch

from . import binaries, device
from .call import Call
from .kernels.attention import Dequantise, Masking, Scoring, attention_kernel
from .kernels.spec import Spec
from .kernels.tiles import Batch, Output, Pages, Rows, Table
from .merge import merge_partials
from .plan import Plan, plan
from .problem import Problem
from .tuning.config import KernelConfig, blocks, whole_block
from .tuning.store import lookup

_NO_LIMIT = 1 << 30  # a window side this long limits nothing; longer ones would overflow int32


def attend(call: Call, problem: Problem) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Run a validated call."""
    where = call.q.device
    gpu = device.describe(where)
    plan_ = plan(problem, gpu)
    config = lookup(problem, gpu)
    total_q, heads = call.q.shape[0], call.q.shape[1]
    out = call.out
    if out is None:
        out = call.q.new_empty((total_q, heads, problem.head_dim_v))
    lse = call.q.new_empty((heads, total_q), dtype=torch.float32) if call.return_lse else None
    splits = plan_.num_splits
    target, target_lse = out, lse
    if splits > 1:
        target = call.q.new_empty((splits, total_q, heads, problem.head_dim_v), dtype=torch.float32)
        target_lse = call.q.new_empty((splits, heads, total_q), dtype=torch.float32)
    grid, args, spec = prepare(call, problem, plan_, config, gpu, target, target_lse)
    options = binaries.Options(config.num_warps, config.num_stages)
    binaries.launch(attention_kernel, grid, args, {"SPEC": spec}, options, gpu, where)
    if splits > 1 and target_lse is not None:
        merge_partials(target, target_lse, out, lse, gpu)
    return out if lse is None else (out, lse)


def prepare(
    call: Call,
    problem: Problem,
    plan_: Plan,
    config: KernelConfig,
    gpu: device.Device,
    target: torch.Tensor,
    target_lse: torch.Tensor | None,
) -> tuple[int, tuple, Spec]:
    """The attention kernel's grid, arguments and constants.

    ``target`` is out, or one part for each split.
    """
    q = call.q
    k, v, k_cache, v_cache = map(_bytes_if_fp8, (call.k, call.v, call.k_cache, call.v_cache))
    table = None
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
    aligned = _aligned(q, k, v, k_cache, v_cache, target)
    spec = _spec(problem, config, gpu, target_lse is not None, aligned)
    args = (
        _rows(q), _rows(k), _rows(v), _pages(k_cache), _pages(v_cache),
        _scale(call.k_scale), _scale(call.v_scale), table, batch, scoring, masking, output,
        problem.num_kv_heads, plan_.num_splits, -(-plan_.split_keys // config.block_n),
    )  # fmt: skip
    block_q = config.block_m // config.pack
    tiles = problem.batch
    if call.cu_seqlens_q is not None:
        tiles += problem.total_q // block_q + 1
    programs = tiles * plan_.num_splits * problem.num_kv_heads * -(-problem.group // config.pack)
    return programs, args, spec


def _spec(
    problem: Problem, config: KernelConfig, gpu: device.Device, has_lse: bool, aligned: bool
) -> Spec:
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


def _bytes_if_fp8(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """float8 values travel as bytes: not every GPU, nor the interpreter, has the type."""
    if tensor is not None and tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8)
    return tensor


def _aligned(*tensors: torch.Tensor | None) -> bool:
    """Whether every row of every tensor starts on 16 bytes."""
    for tensor in tensors:
        if tensor is not None:
            size = tensor.element_size()
            if tensor.data_ptr() % 16:
                return False
            for length, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False):
                if length > 1 and stride * size % 16:
                    return False
    return True


def _rows(tensor: torch.Tensor | None) -> Rows | None:
    return None if tensor is None else Rows(tensor, tensor.stride(0), tensor.stride(1))


def _pages(tensor: torch.Tensor | None) -> Pages | None:
    return None if tensor is None else Pages(tensor, *tensor.stride()[:3])


def _scale(scale: float | torch.Tensor | None) -> Dequantise:
    if not isinstance(scale, torch.Tensor):
        return Dequantise(1.0 if scale is None else float(scale), None, 0, 0)
    if scale.numel() == 1:
        return Dequantise(1.0, scale, 0, 0)
    return Dequantise(1.0, scale, scale.stride(0) if scale.dim() == 2 else 0, scale.stride(-1))
