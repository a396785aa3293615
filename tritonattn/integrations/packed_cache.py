"""The packed KV cache of vLLM's first paged-attention kernels, converted without loss both ways.

A page of that cache keeps ``x = 16 / itemsize`` dims of a key together, so that a thread reads 16
bytes, and the values of one dim side by side::

    k_packed[page, head, d // x, offset, d % x] = k_cache[page, offset, head, d]
    v_packed[page, head, d, offset]             = v_cache[page, offset, head, d]

No stride of a tensor can say ``d // x``, and every function of this package wants stride 1 on the
last axis, so a packed cache is no view of a paged one: it is converted, once, when pages of another
system are taken over or handed back.  Page ids, slots and block tables stay what they are, and a
part of a pool converts as the whole does: ``unpack_kv_cache(k_packed[ids], v_packed[ids])``.

Source: PagedAttention (Kwon et al. 2023) and its caches in vLLM.
"""

from __future__ import annotations

import torch

from .. import rules
from ..cache_rules import INTEGERS
from ..errors import bad_type, bad_value

Pair = tuple[torch.Tensor, torch.Tensor]


def unpack_kv_cache(
    k_packed: torch.Tensor, v_packed: torch.Tensor, *, out: Pair | None = None
) -> Pair:
    """A packed cache as this package's paged cache.

    k_packed: ``[num_pages, Hkv, D / x, page_size, x]``, any x, dtype, device and strides.
    v_packed: ``[num_pages, Hkv, Dv, page_size]``, the dtype and device of k_packed, any strides.
    out: None, or ``(k_cache, v_cache)`` to write: of the shapes below and of k_packed's dtype and
        device, stride 1 on the last axis, sharing no memory with the input.

    Returns ``k_cache [num_pages, page_size, Hkv, D]`` and ``v_cache [num_pages, page_size, Hkv,
    Dv]``.  Every value keeps its bits, and nothing waits for the GPU.

    Raises ArgumentTypeError or ArgumentValueError for shapes, dtypes or devices that do not fit.

    >>> import torch
    >>> from tritonattn.integrations.packed_cache import unpack_kv_cache
    >>> k_packed = torch.arange(16.0).view(1, 1, 2, 2, 4)  # a page of 2 tokens, 8 dims, x = 4
    >>> v_packed = torch.arange(16.0).view(1, 1, 8, 2)
    >>> k_cache, v_cache = unpack_kv_cache(k_packed, v_packed)
    >>> k_cache[0, 1, 0].tolist()  # the second token's key
    [4.0, 5.0, 6.0, 7.0, 12.0, 13.0, 14.0, 15.0]
    >>> v_cache[0, 1, 0].tolist()
    [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0]
    """
    f = "unpack_kv_cache"
    _packed(f, k_packed, v_packed)
    num_pages, num_heads, parts, page_size, x = k_packed.shape
    shape = (num_pages, page_size, num_heads)
    new = (k_packed.new_empty(*shape, parts * x), v_packed.new_empty(*shape, v_packed.shape[2]))
    k_cache, v_cache = _out(f, out, new)
    _copy(k_cache.unflatten(-1, (parts, x)), k_packed.permute(0, 3, 1, 2, 4))
    _copy(v_cache, v_packed.permute(0, 3, 1, 2))
    return k_cache, v_cache


def pack_kv_cache(k_cache: torch.Tensor, v_cache: torch.Tensor, *, out: Pair | None = None) -> Pair:
    """This package's paged cache as a packed one, with ``x = 16 / itemsize``.

    k_cache: ``[num_pages, page_size, Hkv, D]``, D a multiple of x, any dtype and device, stride 1
        on the last axis.
    v_cache: ``[num_pages, page_size, Hkv, Dv]``, the dtype and device of k_cache.
    out: None, or ``(k_packed, v_packed)`` to write: of the shapes below and of k_cache's dtype and
        device, any strides, sharing no memory with the input.

    Returns ``k_packed [num_pages, Hkv, D / x, page_size, x]`` and ``v_packed [num_pages, Hkv, Dv,
    page_size]``.  Every value keeps its bits, and nothing waits for the GPU.

    Raises ArgumentTypeError or ArgumentValueError for shapes, dtypes or devices that do not fit.

    >>> import torch
    >>> from tritonattn.integrations.packed_cache import pack_kv_cache, unpack_kv_cache
    >>> k_cache, v_cache = torch.randn(2, 6, 16, 2, 64).half()  # 6 pages of 16 tokens each
    >>> k_packed, v_packed = pack_kv_cache(k_cache, v_cache)
    >>> list(k_packed.shape), list(v_packed.shape)
    ([6, 2, 8, 16, 8], [6, 2, 64, 16])
    >>> torch.equal(unpack_kv_cache(k_packed, v_packed)[0], k_cache)
    True
    """
    f = "pack_kv_cache"
    device = rules.tensor(f, "k_cache", k_cache, "[num_pages, page_size, Hkv, D]").device
    rules.kv_pages(f, k_cache, v_cache, device, "k_cache")
    num_pages, page_size, num_heads, head_dim = k_cache.shape
    x = 16 // k_cache.dtype.itemsize
    if head_dim % x:
        rule = f"must have a multiple of {x} dims a head, x = 16 / itemsize"
        fix = "Keep this cache as it is: only the packed form asks for that."
        raise bad_value(f, "k_cache", rule, k_cache, fix)
    parts, head_dim_v = head_dim // x, v_cache.shape[3]
    new = (
        k_cache.new_empty(num_pages, num_heads, parts, page_size, x),
        v_cache.new_empty(num_pages, num_heads, head_dim_v, page_size),
    )
    k_packed, v_packed = _out(f, out, new)
    _copy(k_packed, k_cache.unflatten(-1, (parts, x)).permute(0, 2, 3, 1, 4))
    _copy(v_packed, v_cache.permute(0, 2, 3, 1))
    return k_packed, v_packed


def _packed(f: str, k_packed: torch.Tensor, v_packed: torch.Tensor) -> None:
    what = "[num_pages, Hkv, D / x, page_size, x]", "[num_pages, Hkv, Dv, page_size]"
    for name, x, ndim, layout in (
        ("k_packed", k_packed, 5, what[0]),
        ("v_packed", v_packed, 4, what[1]),
    ):
        rules.tensor(f, name, x, layout)
        rules.rank(f, name, x, ndim, layout)
    rules.same_dtype(f, "v_packed", v_packed, k_packed.dtype, "k_packed")
    rules.same_device(f, "v_packed", v_packed, k_packed.device, "k_packed")
    fix = "Pass k_packed and v_packed with the same pages and heads."
    for axis, noun in ((0, "num_pages"), (1, "Hkv"), (3, "page_size")):
        why = f"{noun} of k_packed"
        rules.size(f, "v_packed", v_packed, axis, k_packed.shape[axis], why, fix)


def _out(f: str, out: Pair | None, new: Pair) -> Pair:
    """``out``, or ``new`` where there is none."""
    if out is None:
        return new
    if not isinstance(out, tuple | list) or len(out) != 2:
        rule = "must be None or a pair of tensors, keys and values"
        raise bad_type(f, "out", rule, out, "Pass (keys, values).")
    for i, (given, want) in enumerate(zip(out, new, strict=True)):
        name = f"out[{i}]"
        rules.tensor(f, name, given, str(list(want.shape)))
        rules.same_dtype(f, name, given, want.dtype, "the input")
        rules.same_device(f, name, given, want.device, "the input")
        if given.shape != want.shape:
            fix = "Pass torch.empty of that shape."
            raise bad_value(f, name, f"must be {list(want.shape)}", given, fix)
        rules.no_overlap(f, name, given)
        if want.dim() == 4 and f == "unpack_kv_cache":
            rules.unit_stride(f, name, given)
    return out[0], out[1]


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    """As integers, which keep a NaN's bits and which torch copies where it may not know float8."""
    integer = INTEGERS[source.dtype.itemsize]
    destination.view(integer).copy_(source.view(integer))
