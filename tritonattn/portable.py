"""A call for the portable kernel: its binary, grid and arguments."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .arguments import (
    batch_of,
    bytes_if_fp8,
    dequantise,
    masking_of,
    output,
    pages,
    partials,
    rows,
    scoring_of,
    table_of,
)
from .binaries import Options, Work
from .boxes import Box, box
from .call import Call
from .device import Device
from .kernels.attention import attention_kernel
from .kernels.masks import Masking
from .kernels.results import GROUP
from .kernels.spec import Spec
from .kernels.splits import Shares, Splits
from .kernels.tiles import Pages
from .plan import NO_LIMIT, Kind, Plan
from .problem import Problem
from .tuning.config import (
    KernelConfig,
    blocks,
    converts_pairs,
    has_few_rows,
    has_tensor_cores,
    reads_values_as_keys,
    whole_block,
)

SCRATCH = 1 << 24  # float32 numbers of partial results
REGISTERS = 1 << 16  # of a multiprocessor
USUAL_REGISTERS = 128  # of a thread, at most, where it has few rows


class Partial(NamedTuple):
    """Memory for results over some of a tile's keys.

    Of parts: ``[parts, tokens, heads, dim]``, ``[parts, heads, tokens]`` and ``[heads, tokens]``;
    of shares: ``[2 programs, block_m, block_dv]``, ``[2 programs, block_m]`` and, zero when idle,
    ``[2 programs]``.
    """

    out: torch.Tensor
    lse: torch.Tensor
    counts: torch.Tensor


def prepare(
    call: Call,
    problem: Problem,
    kind: Kind,
    plan: Plan,
    config: KernelConfig,
    gpu: Device,
    spec: Spec,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    partial: Partial | None,
) -> Work:
    tiles = problem.batch
    if call.cu_seqlens_q is not None:
        block_q = config.block_m // config.pack
        tiles += problem.total_q // block_q + 1
        tiles = min(tiles, (problem.batch + 1) * -(-kind.most_q // block_q))
    tiles *= problem.num_kv_heads * -(-problem.group // config.pack)
    grid = tiles * plan.num_splits
    settle = None
    if plan.cut == "shares" and tiles > 0:
        settle = functools.partial(_settle, plan=plan, config=config, gpu=gpu)
        keys = min(problem.capacity_k, _widest(masking_of(call, problem), config))
        parts = keys // max(1, _least_tiles(plan, config) * config.block_n) + 2
        grid = min(share_programs(plan, config, problem) + tiles, tiles * parts)
    return Work(
        attention_kernel, grid,
        _arguments(call, problem, kind, plan, config, spec, out, lse, partial), {"SPEC": spec},
        Options(config.num_warps, config.num_stages, launch_pdl=spec.EARLY), settle,
    )  # fmt: skip


def _arguments(
    call: Call,
    problem: Problem,
    kind: Kind,
    plan: Plan,
    config: KernelConfig,
    spec: Spec,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    partial: Partial | None,
) -> tuple:
    k: Any = None
    v: Any = None
    k_cache = v_cache = None
    splits: Splits | Shares | None = None
    if call.k is not None and call.v is not None:
        k, v = rows(call.k), rows(call.v)
        if spec.BOXES:
            k, v = (_boxed(x, spec, call.q) for x in (call.k, call.v))
    if call.k_cache is not None and call.v_cache is not None:
        k_cache, v_cache = pages(bytes_if_fp8(call.k_cache)), pages(bytes_if_fp8(call.v_cache))
        if spec.IS_LATENT or k_cache[1:] == v_cache[1:]:
            v_cache = Pages(v_cache.ptr, None, None, None)
    masking = masking_of(call, problem)
    parts = None
    if partial is not None and plan.cut == "parts":
        parts = partials(*partial)
        splits = Splits(plan.num_splits, -(-plan.split_keys // config.block_n))
    elif partial is not None:
        splits = Shares(
            *partial, share_programs(plan, config, problem), plan.residents,
            _least_tiles(plan, config), _widest(masking, config),
        )  # fmt: skip
    return (
        rows(call.q), k, v, k_cache, v_cache,
        dequantise(call.k_scale), dequantise(call.v_scale), table_of(call, problem),
        batch_of(call, problem, kind), scoring_of(call, problem), masking, output(out, lse),
        parts, splits, problem.num_kv_heads,
    )  # fmt: skip


def _boxed(tensor: torch.Tensor, spec: Spec, spare: torch.Tensor) -> Box | TensorDescriptor:
    """Packed keys or values ``[tokens, heads, dim]`` as ``[heads, tokens, dim]``, by tiles of one
    head."""
    block = (1, spec.BLOCK_N, whole_block(tensor.shape[2]))
    made = box(tensor.transpose(0, 1), block, None, spare)
    if not spec.INTERPRETED:
        return made
    base = tensor if tensor.numel() else spare
    return TensorDescriptor(base, [*made.shape], [*made.strides], [*block])


def _widest(masking: Masking, config: KernelConfig) -> int:
    """About how many keys a tile of queries can see, however many there are."""
    left, right, chunk = cast(tuple[int, int, int], masking[:3])
    return min(left + right, chunk, NO_LIMIT) + config.block_m // config.pack


def _least_tiles(plan: Plan, config: KernelConfig) -> int:
    return -(-plan.least_keys // config.block_n)


def _fit(registers: int, shared: int, config: KernelConfig, gpu: Device) -> int:
    """Programs that a multiprocessor runs at the same time, by what one of them takes."""
    if gpu.is_interpreter:
        return 1
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * config.num_warps)
    return max(1, min(by_registers, gpu.shared_memory // max(1, shared)))


def _settle(
    args: tuple, registers: int, shared: int, plan: Plan, config: KernelConfig, gpu: Device
) -> tuple:
    """The arguments, once it is known what the binary takes."""
    fit = _fit(registers, shared, config, gpu) * gpu.sm_count
    *others, splits, num_kv_heads = args
    return (*others, splits._replace(residents=min(plan.residents, fit)), num_kv_heads)


def share_programs(plan: Plan, config: KernelConfig, problem: Problem) -> int:
    """Shares of the batch's work: the plan's, or as many as there is scratch for."""
    room = SCRATCH // (2 * config.block_m * whole_block(problem.head_dim_v))
    return min(plan.programs, max(room, plan.residents))


def _share_rows(problem: Problem, plan: Plan, config: KernelConfig) -> int:
    if plan.cut != "shares":
        return 0
    # Two at least: numbers of two rows pass from thread to thread, which makes all wait until all
    # have read; the merged rows of a group are then written where its first piece's were.
    return max(2, 1 << (config.pack - 1).bit_length()) if problem.is_decode else config.block_m


def _share_step(rows: int, problem: Problem, config: KernelConfig) -> int:
    """As many parts as take half of a thread's usual registers."""
    numbers = USUAL_REGISTERS // 2 * 32 * config.num_warps
    cells = rows * whole_block(problem.head_dim_v)
    return min(max(numbers // cells, 1), GROUP) if rows else 0


def _row_sums(problem: Problem, config: KernelConfig, gpu: Device) -> int:
    """Tensor cores' results leave keys that are 8 a warp apart with one thread."""
    is_float32 = problem.dtype == torch.float32
    if is_float32 or gpu.backend == "hip" or not has_tensor_cores(gpu):
        return 1
    return min(config.block_n, 8 * config.num_warps) if has_few_rows(config, problem) else 1


def make_spec(
    problem: Problem,
    plan: Plan,
    config: KernelConfig,
    gpu: Device,
    has_lse: bool,
    aligned: bool,
) -> Spec:
    """What selects the machine code of a problem under a configuration."""
    page = problem.page_size
    mask = problem.mask
    share_rows = _share_rows(problem, plan, config)
    return Spec(
        problem.head_dim,
        problem.head_dim_v,
        blocks(problem.head_dim, problem.dtype, gpu),
        whole_block(problem.head_dim_v),
        config.block_m,
        config.block_n,
        problem.group,
        config.pack,
        page if page & (page - 1) == 0 and page <= 1024 else 0,
        problem.cache_format,
        gpu.has_native_e4m3,
        aligned and converts_pairs(config, problem, gpu),
        # Beside new keys the queries are there in both formats, for which RDNA has no registers.
        problem.cache_format != ""
        and problem.dtype == torch.bfloat16
        and not (problem.has_new and gpu.backend == "hip"),
        has_few_rows(config, problem),
        reads_values_as_keys(problem, gpu),
        _row_sums(problem, config, gpu),
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
        not problem.is_positive or problem.has_scales or problem.has_query_scale,
        has_lse,
        plan.cut,
        share_rows,
        _share_step(share_rows, problem, config),
        aligned,
        config.form == "boxes",
        gpu.launches_early,
        gpu.is_interpreter,
    )
