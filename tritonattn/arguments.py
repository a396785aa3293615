"""Tensors and numbers as kernels take them."""

from __future__ import annotations

import torch

from . import rules
from .call import Call, Scale
from .kernels.masks import Masking
from .kernels.softmax import Scoring
from .kernels.tiles import Batch, Dequantise, Output, Pages, Partials, Rows, Table
from .plan import NO_LIMIT, Kind
from .problem import Problem


def rows(tensor: torch.Tensor) -> Rows:
    """``[tokens, heads, dim]``."""
    return Rows(tensor, tensor.stride(0), tensor.stride(1))


def pages(tensor: torch.Tensor) -> Pages:
    """``[pages, page_size, heads, dim]``."""
    return Pages(tensor, tensor.stride(0), tensor.stride(1), tensor.stride(2))


def output(out: torch.Tensor, lse: torch.Tensor | None) -> Output:
    """``[tokens, heads, dim]`` and ``[heads, tokens]``."""
    return Output(out, out.stride(0), out.stride(1), lse, 0 if lse is None else lse.stride(0))


def partials(out: torch.Tensor, lse: torch.Tensor, counts: torch.Tensor | None) -> Partials:
    """``[parts, tokens, heads, dim]``, ``[parts, heads, tokens]`` and ``[heads, tokens]``."""
    return Partials(
        out, out.stride(0), out.stride(1), out.stride(2), lse, lse.stride(0), lse.stride(1), counts
    )


def dequantise(scale: Scale) -> Dequantise:
    """A float, or a tensor ``[]``, ``[1]``, ``[Hkv]`` or ``[B, Hkv]``."""
    if not isinstance(scale, torch.Tensor):
        return Dequantise(1.0 if scale is None else float(scale), None, 0, 0)
    if scale.numel() == 1:
        return Dequantise(1.0, scale, 0, 0)
    return Dequantise(1.0, scale, scale.stride(0) if scale.dim() == 2 else 0, scale.stride(-1))


def bytes_if_fp8(tensor: torch.Tensor) -> torch.Tensor:
    """float8 values travel as bytes: not every GPU, nor the interpreter, has the type."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def is_aligned(*tensors: torch.Tensor) -> bool:
    """Whether every row of every tensor starts on 16 bytes."""
    return all(x.data_ptr() % 16 == 0 and rules.keeps_alignment(x) for x in tensors)


def table_of(call: Call, problem: Problem) -> Table | None:
    ids = call.block_table
    if ids is None:
        return None
    stride_seq = ids.stride(0) if ids.dim() == 2 else 0
    return Table(ids, call.block_indptr, stride_seq, problem.page_size)


def batch_of(call: Call, problem: Problem, kind: Kind) -> Batch:
    lens = call.cu_seqlens_k
    if lens is None:
        lens = call.context_lens if call.context_lens is not None else call.seq_lens
    assert lens is not None
    bounds = (None, None) if call.cu_seqlens_q is None else (kind.least_q, kind.most_q)
    return Batch(call.cu_seqlens_q, lens, problem.batch, problem.total_q, *bounds)


def masking_of(call: Call, problem: Problem) -> Masking:
    left, right = call.window_size or (None, None)
    if problem.mask.causal and not problem.mask.has_tree:
        right = 0
    tree = None if call.tree_mask is None else call.tree_mask.view(torch.uint8)
    strides = (0, 0, 0) if tree is None else (*tree.stride(), tree.shape[1])
    return Masking(_limit(left), _limit(right), _limit(call.chunk_size), tree, *strides)


def scoring_of(call: Call, problem: Problem) -> Scoring:
    alibi, sinks = call.alibi_slopes, call.sinks
    stride_alibi = (0, 0)
    if alibi is not None:
        stride_alibi = (alibi.stride(0) if alibi.dim() == 2 else 0, alibi.stride(-1))
    return Scoring(
        float(problem.head_dim**-0.5 if call.softmax_scale is None else call.softmax_scale),
        float(call.softcap),
        None if call.query_scale is None else call.query_scale.contiguous(),
        alibi,
        *stride_alibi,
        sinks,
        0 if sinks is None else sinks.stride(0),
    )


def _limit(side: int | None) -> int:
    """A window side as long as that limits nothing; longer ones would overflow int32."""
    return NO_LIMIT if side is None or side < 0 else min(side, NO_LIMIT)
