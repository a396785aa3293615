"""What the cache functions do once they are called: rules, then grid, scratch and launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import cache_rules
from . import device as devices
from .call import Scale
from .problem import FP8_FORMATS


def write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: Scale,
    v_scale: Scale,
) -> None:
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
        from .repeat import Repeat

        repeats[starts_aligned] = Repeat(launched)


def gather(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    total_k: int,
    k_scale: Scale,
    v_scale: Scale,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = cache_rules.check_gather(
        k_cache, v_cache, block_table, seq_lens, cu_seqlens_k, total_k, k_scale, v_scale, out_dtype
    )
    num_heads, head_dim, head_dim_v = *k_cache.shape[2:], v_cache.shape[3]
    batch = seq_lens.shape[0]
    k, v = gathered(k_cache, v_cache, total_k, dtype)
    if batch == 0:
        return k.zero_(), v.zero_()
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


def gathered(
    k_cache: torch.Tensor, v_cache: torch.Tensor, total_k: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """New tensors for what is gathered."""
    k = k_cache.new_empty((total_k, *k_cache.shape[2:]), dtype=dtype)
    return k, k_cache.new_empty((total_k, *v_cache.shape[2:]), dtype=dtype)


def copy(caches: torch.Tensor | Sequence[torch.Tensor], block_mapping: torch.Tensor) -> None:
    tensors = cache_rules.check_copy(caches, block_mapping)
    source, destination = block_mapping.unbind(1)
    for cache in tensors:
        _copy_pages(cache, cache, source, destination)


def swap(source: torch.Tensor, destination: torch.Tensor, block_mapping: torch.Tensor) -> None:
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
