"""Call, Plan and KernelConfig to scratch and launch."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from . import binaries, device, portable, validate
from .call import Call
from .merge import merge_partials
from .plan import HOPPER, Plan, plan
from .portable import Partial, share_programs
from .problem import Problem
from .scratch import take, take_counters
from .tuning.config import KernelConfig, whole_block
from .tuning.store import forced, lookup

# What may be a tensor, in the order in which ``arguments`` takes it.
_INPUTS = (
    "q", "k", "v", "k_cache", "v_cache", "k_scale", "v_scale", "block_table", "block_indptr",
    "cu_seqlens_q", "cu_seqlens_k", "context_lens", "seq_lens", "query_scale", "alibi_slopes",
    "sinks", "tree_mask",
)  # fmt: skip


@dataclass(slots=True)
class Ready:
    """What calls with the same Problem share: worked out at the first, looked up at the others."""

    gpu: device.Device
    plan: Plan
    config: KernelConfig
    spec: Any  # of the kernel that the configuration is for


@dataclass(slots=True)
class Repeats:
    """What calls that differ in addresses alone launch."""

    inputs: Callable[[Call], tuple[torch.Tensor, ...]]  # those that are given, in their order
    attention: binaries.Repeat
    merge: binaries.Repeat | None
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    offsets: list[int]  # of the partial results in their scratch, in bytes
    scratch: int  # its size, in float32
    counters: int  # int32 zeros beside it


_ready: dict[tuple, Ready] = {}
_READY_LIMIT = 4096


def attend(call: Call, problem: Problem) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Run a validated call."""
    key = (*_alignment(call, problem), forced())
    repeats = call.repeats.get(key) if call.repeats is not None else None
    if repeats is None:
        return _first(call, problem, key)
    out = call.out
    if out is None:
        out = call.q.new_empty(repeats.out_shape)
    lse = call.lse
    if lse is None and call.return_lse:
        lse = call.q.new_empty(repeats.lse_shape, dtype=torch.float32)
    addresses = [x.data_ptr() for x in repeats.inputs(call)]
    results = [out.data_ptr()]
    if lse is not None:
        results.append(lse.data_ptr())
    parts: list[int] = []
    if repeats.offsets:
        scratch = take(call.q, repeats.scratch, shared=not call.is_operator)
        start = scratch.data_ptr()
        parts = [start + offset for offset in repeats.offsets]
    if repeats.counters:
        counters = take_counters(call.q, repeats.counters, shared=not call.is_operator)
        parts.append(counters.data_ptr())
    repeats.attention(*addresses, *results, *parts)
    if repeats.merge is not None:
        repeats.merge(*parts, *results)
    return out if lse is None else (out, lse)


def forget() -> None:
    """Look everything up again at the next call: for whoever changes tables or configurations."""
    _ready.clear()
    validate.forget()


def _first(
    call: Call, problem: Problem, key: tuple
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Run a call, and keep what others of its kind can repeat under ``key``."""
    q = call.q
    ready = _get_ready(call, problem, *key)
    config = ready.config
    total_q, heads, _ = q.shape
    shape, lse_shape = (total_q, heads, problem.head_dim_v), (heads, total_q)
    out = call.out
    if out is None:
        out = q.new_empty(shape)
    lse = call.lse
    if lse is None and call.return_lse:
        lse = q.new_empty(lse_shape, dtype=torch.float32)
    partial = _partial(call, problem, ready.plan, config, shape)
    work = kernel_side(config).prepare(
        call, problem, ready.plan, config, ready.gpu, ready.spec, out, lse, partial
    )
    kernel, grid, args, constants, options = work
    # Without rows there is nothing to write, and the kernel that merges parts does not run either.
    grid = grid if total_q else 0
    attention = binaries.launch(kernel, grid, args, constants, options, ready.gpu, q.device)
    merge = None
    if isinstance(partial, Partial) and ready.plan.cut == "parts":
        merge = merge_partials(partial.out, partial.lse, out, lse, ready.gpu, partial.counts)
    if attention is not None and call.repeats is not None:
        names = [name for name in _INPUTS if isinstance(getattr(call, name), torch.Tensor)]
        inputs, repeat = operator.attrgetter(*names), binaries.Repeat(attention)
        given = [x.data_ptr() for x in (*inputs(call), out, lse, *(partial or ())) if x is not None]
        # Not so where an argument had to be copied into another layout.
        if repeat.addresses == given:
            kept = list(partial or ())
            has_counters = ready.plan.cut == "shares" or (kept and config.kernel == HOPPER)
            counters = kept.pop().numel() if has_counters else 0
            call.repeats[key] = Repeats(
                inputs, repeat, None if merge is None else binaries.Repeat(merge),
                shape, lse_shape, [x.data_ptr() - kept[0].data_ptr() for x in kept],
                sum(x.numel() for x in kept), counters,
            )  # fmt: skip
    return out if lse is None else (out, lse)


def _partial(
    call: Call,
    problem: Problem,
    plan_: Plan,
    config: KernelConfig,
    shape: tuple[int, int, int],
) -> Partial | tuple[torch.Tensor] | None:
    """Memory beside the result: for partial ones, or for Hopper's kernel two counters."""
    tokens, heads, dim = shape
    shared = not call.is_operator
    if config.kernel == HOPPER:
        is_drawn = "drawn" in config.form
        return (take_counters(call.q, 2, shared=shared),) if is_drawn else None
    if plan_.cut == "":
        return None
    if plan_.cut == "shares":
        pieces = 2 * share_programs(plan_, config, problem)
        rows, block_dv = pieces * config.block_m, whole_block(dim)
        scratch = take(call.q, rows * (block_dv + 1), shared=shared)
        out, lse = scratch[: rows * (block_dv + 1)].split((rows * block_dv, rows))
        return Partial(out, lse, take_counters(call.q, pieces, shared=shared))
    parts = plan_.num_splits
    sizes = parts * tokens * heads * dim, parts * tokens * heads, tokens * heads
    scratch = take(call.q, sum(sizes), shared=shared)
    out, lse, counts = scratch[: sum(sizes)].split(sizes)
    return Partial(
        out.view(parts, tokens, heads, dim), lse.view(parts, heads, tokens),
        counts.view(torch.int32).view(heads, tokens),
    )  # fmt: skip


def _alignment(call: Call, problem: Problem) -> tuple[bool, bool]:
    """Whether all tensors that are read start on 16 bytes, and whether all rows of ``out`` do."""
    k, v, k_cache, v_cache, out = call.k, call.v, call.k_cache, call.v_cache, call.out
    starts = call.q.data_ptr()
    if k is not None and v is not None:
        starts |= k.data_ptr() | v.data_ptr()
    if k_cache is not None and v_cache is not None:
        starts |= k_cache.data_ptr() | v_cache.data_ptr()
    is_aligned = problem.rows_aligned and (out is None or out.data_ptr() % 16 == 0)
    return starts % 16 == 0, is_aligned


def _get_ready(
    call: Call, problem: Problem, starts: bool, aligned: bool, config: KernelConfig | None
) -> Ready:
    key = (problem, call.q.device, call.return_lse, call.out is None, starts, aligned, config)
    ready = _ready.get(key)
    if ready is None:
        if not starts:
            problem = dataclasses.replace(problem, has_boxes=False)
        gpu = device.describe(call.q.device)
        found = lookup(problem, gpu)
        plan_ = plan(problem, gpu, found.kernel)
        if found.kernel != HOPPER:
            aligned &= starts
        if plan_.cut == "parts":  # partial results in float32, packed
            aligned &= problem.head_dim_v % 4 == 0
        if call.out is None:
            aligned &= problem.head_dim_v * problem.dtype.itemsize % 16 == 0
        spec = make_spec(problem, plan_, found, gpu, call.return_lse, aligned)
        if len(_ready) >= _READY_LIMIT:
            _ready.clear()
        ready = _ready[key] = Ready(gpu, plan_, found, spec)
    return ready


def kernel_side(config: KernelConfig) -> ModuleType:
    """The module that prepares calls for the configuration's kernel."""
    if config.kernel == HOPPER:
        from . import hopper  # for few GPUs

        return hopper
    return portable


def make_spec(
    problem: Problem,
    plan_: Plan,
    config: KernelConfig,
    gpu: device.Device,
    has_lse: bool,
    aligned: bool,
) -> Any:
    """What selects the machine code of a problem under a configuration."""
    return kernel_side(config).make_spec(problem, plan_, config, gpu, has_lse, aligned)
