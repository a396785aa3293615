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


def box(
    tensor: torch.Tensor, block_shape: Sequence[int], layout: object, spare: torch.Tensor
) -> Box:
    """``tensor``'s box.  An empty tensor has no memory: none is ever copied from there, but TMA
    wants an address, for which there is ``spare``."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    if tensor.numel() == 0:
        tensor, shape = spare, (1,) * len(shape)
    # An axis of one entry is never stepped along, so its stride may be any; TMA's may not.
    step = ALIGNMENT // tensor.element_size()
    steps = [stride if n > 1 else step for n, stride in zip(shape, strides, strict=True)]
    return Box(
        tensor.data_ptr(), tensor.dtype, shape, (*steps[:-1], 1), tuple(block_shape), layout
    )  # fmt: skip


def has_boxes(tensor: torch.Tensor) -> bool:
    """Whether TMA can copy boxes of ``tensor``, wherever it starts.

    Strides along axes of one entry are looked at too: how long an axis is, say how many queries
    there are, must not choose between kernels.
    """
    itemsize = tensor.element_size()
    for n, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False):
        if n >= _MOST_SIZE or stride * itemsize % ALIGNMENT:
            return False
        if n > 1 and not 0 < stride * itemsize < _MOST_STRIDE:
            return False
    return True
