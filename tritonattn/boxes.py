"""Tensors as Hopper's copy engine, TMA, takes them: an address, sizes and strides, and a box.

One instruction copies the box that starts at any index into shared memory, and zeros for what of it
lies outside the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALIGNMENT = 16  # bytes, of the address and of every stride but the last, which is one element
_MOST_STRIDE = 1 << 40  # bytes
_MOST_SIZE = 1 << 31  # kernels count in int32


class Box:
    """A tensor and a box's shape, with what Triton's launcher reads of its own TensorDescriptor.

    It keeps no tensor alive, and making one costs little: a launch that is repeated makes it anew.
    """

    __slots__ = ("address", "block_shape", "dtype", "layout", "shape", "strides")

    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(
        self,
        address: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        block_shape: tuple[int, ...],
        layout: object,
    ) -> None:
        self.address = address
        self.dtype = dtype
        self.shape = shape
        self.strides = strides
        self.block_shape = block_shape
        self.layout = layout

    @property
    def base(self) -> Box:
        return self

    def data_ptr(self) -> int:
        return self.address

    def at(self, address: int) -> Box:
        return Box(
            address, self.dtype, self.shape, self.strides, self.block_shape, self.layout
        )  # fmt: skip


def box(tensor: torch.Tensor, block_shape: Sequence[int], layout: object) -> Box:
    """``tensor``'s box; an axis of one entry is never stepped along, so its stride may be any."""
    step = ALIGNMENT // tensor.element_size()
    strides = (
        stride if length > 1 or i == tensor.dim() - 1 else step
        for i, (length, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    )
    return Box(
        tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(strides), tuple(block_shape),
        layout,
    )  # fmt: skip


def why_not(tensor: torch.Tensor) -> str:
    """Why no box can be copied from ``tensor``, wherever it starts; "" if one can."""
    itemsize = tensor.element_size()
    if tensor.numel() == 0:
        return "is empty"
    for length, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False):
        if length >= _MOST_SIZE:
            return f"has {length} entries on an axis"
        if length > 1 and (stride <= 0 or stride * itemsize % ALIGNMENT):
            return f"has a stride of {stride * itemsize} bytes"
        if length > 1 and stride * itemsize >= _MOST_STRIDE:
            return f"has a stride of {stride * itemsize} bytes"
    return ""
