"""Tensors as kernels take them."""

from __future__ import annotations

import torch

from . import rules
from .call import Scale
from .kernels.tiles import Dequantise, Output, Pages, Partials, Rows


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
