"""The public cache functions: writing, gathering and copying the pages of a paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import cache_rules
from . import device as devices
from .call import Scale
from .problem import FP8_FORMATS


def write_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> None:
    """Write new keys and values to their slots of a paged cache.

    k, v: ``[n, Hkv, D]`` and ``[n, Hkv, Dv]``, float16, bfloat16 or float32, last stride 1, on the
        cache's GPU.
    k_cache, v_cache: ``[num_pages, page_size, Hkv, D]`` and ``[..., Dv]``, written in place; k's
        dtype or float8; any strides on the first three axes, so K and V may share a pool and either
        heads or tokens may come first in memory.
    slot_mapping: ``[m]`` int32 or int64, m <= n: row i goes to ``page * page_size + offset``.  A
        slot below 0 or past the cache's end is skipped (TRITONATTN_CHECK=1 refuses the latter);
        rows from m on, such as a captured graph's padding, are not read.  No two rows may have the
        same slot.
    k_scale, v_scale: None, a float, or float32 ``[]``, ``[1]`` or ``[Hkv]``.

    Without a scale, 16- and 32-bit values are copied bit for bit.  Otherwise ``value / scale`` is
    rounded to nearest even in the cache's own format and saturates at its greatest finite value;
    NaN stays NaN.  Nothing but the addressed slots changes, and nothing waits for the GPU.

    Raises ArgumentTypeError or ArgumentValueError for shapes, dtypes, strides or devices that do
    not fit, and UnsupportedError for bfloat16 on a GPU without it.

    >>> import torch
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> k_cache, v_cache = torch.zeros(2, 4, 16, 1, 8, device=device).unbind(0)  # 4 pages of 16
    >>> k, v = torch.ones(2, 3, 1, 8, device=device).unbind(0)
    >>> write_kv_cache(k, v, k_cache, v_cache, torch.tensor([17, -1, 63], device=device))
    >>> k_cache[:, :, 0, 0].nonzero().tolist()  # (page, offset)
    [[1, 1], [3, 15]]
    """
    repeats = cache_rules.check_write(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    given = (k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping)
    addresses = [x.data_ptr() for x in given if isinstance(x, torch.Tensor)]
    starts_aligned = not any(address % 16 for address in addresses[:4])
    if repeats is not None and starts_aligned in repeats:
        repeats[starts_aligned](*addresses)
        return
    import triton

    from . import arguments, binaries
    from .kernels.cache_ops import write_kernel

    device = devices.describe(k.device)
    num_pages, page_size, num_heads, head_dim = k_cache.shape
    k_bytes, v_bytes = arguments.bytes_if_fp8(k_cache), arguments.bytes_if_fp8(v_cache)
    num_rows = slot_mapping.shape[0] * num_heads
    block_rows, constants = _constants(head_dim, v.shape[2], device)
    constants |= {
        "FORMAT": FP8_FORMATS.get(k_cache.dtype, ""),
        "HAS_K_SCALE": k_scale is not None,
        "HAS_V_SCALE": v_scale is not None,
        "ALIGNED": arguments.is_aligned(k, v, k_bytes, v_bytes),
        "INTERPRETED": device.is_interpreter,
    }
    args = (
        arguments.rows(k), arguments.rows(v), arguments.pages(k_bytes), arguments.pages(v_bytes),
        arguments.dequantise(k_scale), arguments.dequantise(v_scale),
        slot_mapping, num_rows, num_heads, page_size, num_pages,
    )  # fmt: skip
    grid = triton.cdiv(num_rows, block_rows)
    launched = binaries.launch(
        write_kernel, grid, args, constants, binaries.Options(), device, k.device
    )
    if launched is not None and repeats is not None:
        repeats[starts_aligned] = binaries.Repeat(launched)


def gather_kv_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_k: torch.Tensor,
    total_k: int,
    k_scale: Scale = None,
    v_scale: Scale = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cached keys and values of all sequences, packed one sequence after another.

    k_cache, v_cache: ``[num_pages, page_size, Hkv, D]`` and ``[..., Dv]``, float16, bfloat16,
        float32 or float8; any strides on the first three axes.
    block_table: ``[B, max_pages]`` int32 or int64, each sequence's page ids in order; entries past
        its length may hold anything.
    seq_lens: ``[B]`` int32, tokens in the cache; below 0 counts as 0.
    cu_seqlens_k: ``[B + 1]`` int32, where each sequence's rows start in the result, and where the
        last one's end.
    total_k: rows of the result, at least ``cu_seqlens_k[-1]``, known on the host so that nothing
        waits for the GPU.
    k_scale, v_scale: None, a float, or float32 ``[]``, ``[1]``, ``[Hkv]`` or ``[B, Hkv]``: true
        value = stored value x scale.
    out_dtype: None for the cache's own dtype, else float16, bfloat16 or float32.  A float8 cache
        with a scale wants one.

    Returns ``k [total_k, Hkv, D]`` and ``v [total_k, Hkv, Dv]``.  Rows past ``seq_lens[b]`` of a
    sequence or past ``cu_seqlens_k[-1]`` are 0.  In the cache's own dtype and without a scale
    values keep their bits.

    Raises ArgumentTypeError or ArgumentValueError for shapes, dtypes, strides or devices that do
    not fit, and UnsupportedError for bfloat16 on a GPU without it.

    >>> import torch
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> cache = torch.arange(8.0, device=device).view(4, 2, 1, 1)  # 4 pages of 2 tokens
    >>> table = torch.tensor([[3, 0], [2, -1]], device=device)
    >>> lens, starts = torch.tensor([3, 1, 0, 3, 4], dtype=torch.int32, device=device).split([2, 3])
    >>> k, v = gather_kv_cache(cache, cache, table, lens, cu_seqlens_k=starts, total_k=5)
    >>> k.flatten().tolist()
    [6.0, 7.0, 0.0, 4.0, 0.0]
    """
    dtype = cache_rules.check_gather(
        k_cache, v_cache, block_table, seq_lens, cu_seqlens_k, total_k, k_scale, v_scale, out_dtype
    )
    num_heads, head_dim, head_dim_v = *k_cache.shape[2:], v_cache.shape[3]
    batch = seq_lens.shape[0]
    new = k_cache.new_empty if batch else k_cache.new_zeros
    k = new((total_k, num_heads, head_dim), dtype=dtype)
    v = new((total_k, num_heads, head_dim_v), dtype=dtype)
    if batch == 0:
        return k, v
    import triton

    from . import arguments, binaries
    from .kernels.cache_ops import gather_kernel
    from .kernels.tiles import Table

    device = devices.describe(k.device)
    tensors = [arguments.bytes_if_fp8(x) for x in (k, v, k_cache, v_cache)]
    num_rows = total_k * num_heads
    block_rows, constants = _constants(head_dim, head_dim_v, device)
    constants |= {
        "FORMAT": "" if dtype == k_cache.dtype else FP8_FORMATS.get(k_cache.dtype, ""),
        "HAS_K_SCALE": k_scale is not None,
        "HAS_V_SCALE": v_scale is not None,
        "NATIVE_FP8": device.has_native_e4m3,
        "ALIGNED": arguments.is_aligned(*tensors),
        "INTERPRETED": device.is_interpreter,
    }
    args = (
        *map(arguments.rows, tensors[:2]), *map(arguments.pages, tensors[2:]),
        arguments.dequantise(k_scale), arguments.dequantise(v_scale),
        Table(block_table, None, block_table.stride(0), k_cache.shape[1]), cu_seqlens_k, seq_lens,
        num_rows, num_heads, batch, batch.bit_length(),
    )  # fmt: skip
    grid = triton.cdiv(num_rows, block_rows)
    binaries.launch(gather_kernel, grid, args, constants, binaries.Options(), device, k.device)
    return k, v


def copy_blocks(caches: torch.Tensor | Sequence[torch.Tensor], block_mapping: torch.Tensor) -> None:
    """Copy whole pages within each cache, as copy-on-write and beam search do.

    caches: one tensor or a list of tensors ``[num_pages, ...]``, of any dtype, shape and strides,
        written in place; each layer's k_cache and v_cache, say.  Page ids count along the first
        axis, whatever follows it.
    block_mapping: ``[n, 2]`` int32 or int64 on the caches' device, rows of (source page,
        destination page).  All pages are read before any is written; no two rows may have the same
        destination.

    Pages are copied byte for byte and nothing waits for the GPU.

    Raises ArgumentTypeError or ArgumentValueError for shapes, dtypes or devices that do not fit.

    >>> import torch
    >>> cache = torch.arange(4.0).view(4, 1, 1, 1).repeat(1, 2, 1, 1)
    >>> copy_blocks(cache, torch.tensor([[0, 2], [2, 3]]))
    >>> cache[:, 0].flatten().tolist()
    [0.0, 1.0, 0.0, 2.0]
    """
    tensors = cache_rules.check_copy(caches, block_mapping)
    source, destination = block_mapping.unbind(1)
    for cache in tensors:
        _copy_pages(cache, cache, source, destination)


def swap_blocks(
    source: torch.Tensor, destination: torch.Tensor, block_mapping: torch.Tensor
) -> None:
    """Copy whole pages from one cache to another, on the same device or between CPU and GPU.

    source: ``[num_pages, ...]``, any dtype and strides.
    destination: ``[other_num_pages, ...]``, the same dtype and page shape, any strides, written in
        place.
    block_mapping: ``[n, 2]`` int32 or int64 on the device of either, rows of (page of source, page
        of destination).  No two rows may have the same destination.

    Pages are copied byte for byte.  A copy to the CPU has arrived when the call returns; within one
    GPU nothing waits.

    Raises ArgumentTypeError or ArgumentValueError for shapes, dtypes or devices that do not fit.

    >>> import torch
    >>> on_gpu, on_cpu = torch.arange(4.0).view(4, 1, 1, 1), torch.zeros(2, 1, 1, 1)
    >>> swap_blocks(on_gpu, on_cpu, torch.tensor([[3, 0], [1, 1]]))
    >>> on_cpu.flatten().tolist()
    [3.0, 1.0]
    """
    cache_rules.check_swap(source, destination, block_mapping)
    _copy_pages(source, destination, *block_mapping.unbind(1))


def _copy_pages(
    source: torch.Tensor, destination: torch.Tensor, pages: torch.Tensor, targets: torch.Tensor
) -> None:
    """All pages are read before the first is written.

    Integers keep a NaN's bits, and torch indexes them where it cannot index float8.
    """
    integer = cache_rules.INTEGERS[source.dtype.itemsize]
    copied = source.view(integer).index_select(0, pages.to(source.device))
    copied = copied.to(destination.device)
    destination.view(integer).index_copy_(0, targets.to(destination.device, torch.int64), copied)


def _constants(
    head_dim: int, head_dim_v: int, device: devices.Device
) -> tuple[int, dict[str, object]]:
    """(rows a program, the constants that both kernels share)."""
    import triton

    block_d, block_dv = triton.next_power_of_2(head_dim), triton.next_power_of_2(head_dim_v)
    # Four warps with 16 bytes a thread; the interpreter pays by the program.
    block_rows = 1024 if device.is_interpreter else max(1, 1024 // max(block_d, block_dv))
    constants = {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "BLOCK_ROWS": block_rows,
    }
    return block_rows, constants
