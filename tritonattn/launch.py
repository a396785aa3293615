"""Call, Plan and KernelConfig to scratch and launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from . import attend, binaries, device, portable
from .call import Call, Result
from .merge import merge_partials
from .plan import HOPPER, Kind, Plan, kinds, plan
from .portable import Partial, share_programs
from .problem import Problem
from .repeat import Repeat, is_hooked
from .scratch import NOWHERE, place_at, place_of, take, take_counters
from .tuning.config import KernelConfig, whole_block
from .tuning.store import forced, lookup

# What may be a tensor, in the order in which kernels take it, as in ``attend``.
_INPUTS = (
    "q", "k", "v", "k_cache", "v_cache", "k_scale", "v_scale", "block_table", "block_indptr",
    "cu_seqlens_q", "cu_seqlens_k", "context_lens", "seq_lens", "query_scale", "alibi_slopes",
    "sinks", "tree_mask",
)  # fmt: skip


_Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides and dtype


@dataclass(slots=True)
class Ready:
    """What calls with the same Problem share: worked out at the first, looked up at the others."""

    gpu: device.Device
    plan: Plan
    config: KernelConfig
    spec: Any  # of the kernel that the configuration is for


@dataclass(slots=True)
class Launch:
    """A launch that calls repeat which differ in addresses alone."""

    attention: Repeat
    merge: Repeat | None
    offsets: list[int]  # of the partial results in their scratch, in bytes
    scratch: int  # its size, in float32
    counters: int  # int32 zeros beside it


@dataclass(slots=True)
class Repeats:
    """What calls that differ in addresses alone launch."""

    gpu: int
    out: _Made
    lse: _Made | None
    launches: list[Launch]  # one for each kind of sequences

    def again(
        self,
        addresses: list[int],
        q: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        shared: bool,
    ) -> Result:
        """Launch for other tensors, which are at ``addresses``, in the order of ``_INPUTS``, and
        ``out`` if there is one."""
        gpu = self.gpu
        if gpu != device.current():
            with torch.cuda.device(gpu):
                return self.again(addresses, q, out, lse, shared)
        if out is None:
            out = device.empty(*self.out)
            addresses.append(out.data_ptr())
        if self.lse is not None:
            if lse is None:
                lse = device.empty(*self.lse)
            addresses.append(lse.data_ptr())
        stream, hooked, place = device.stream_of(gpu), is_hooked(), NOWHERE
        for launch in self.launches:
            parts: list[int] = []
            if place is NOWHERE and (launch.counters or launch.offsets):
                place = place_at(gpu, stream)
            if launch.offsets:
                start = take(place, q, launch.scratch, shared=shared).data_ptr()
                parts = [start + offset for offset in launch.offsets]
            if launch.counters:
                parts.append(take_counters(place, q, launch.counters, shared=shared).data_ptr())
            attention, merge = launch.attention, launch.merge
            run = attention.run_hooked if hooked else attention.run
            run(stream, *addresses, *parts)
            if merge is not None:
                run = merge.run_hooked if hooked else merge.run
                run(stream, *parts, *addresses[-1 if lse is None else -2 :])
        return out if lse is None else (out, lse)


# ``Repeats.again``
Again = Callable[[list[int], torch.Tensor, torch.Tensor | None, torch.Tensor | None, bool], Result]

_ready: dict[tuple, Ready] = {}
_READY_LIMIT = 4096


def forget() -> None:
    """Look everything up again at the next call: for whoever changes tables or configurations."""
    _ready.clear()
    attend.forget()


def run(call: Call, problem: Problem) -> tuple[Result, Again | None]:
    """Run a validated call; also what runs others of its kind, None if nothing does."""
    q = call.q
    total_q, heads, _ = q.shape
    out = call.out
    if out is None:
        out = q.new_empty((total_q, heads, problem.head_dim_v))
    lse = call.lse
    if lse is None and call.return_lse:
        lse = q.new_empty((heads, total_q), dtype=torch.float32)
    result: Result = out if lse is None else (out, lse)
    given = [getattr(call, name) for name in _INPUTS]
    inputs = tuple(x for x in given if isinstance(x, torch.Tensor))
    # A configuration that is forced, to measure it, is for all sequences.
    key = (*_alignment(call, problem), forced())
    parts: tuple[Kind, ...] = (Kind(problem),)
    if key[-1] is None:
        parts = kinds(problem, device.describe(q.device))
    made = [_launch(call, problem, kind, key, inputs, out, lse) for kind in parts]
    launches = [launch for launch in made if launch is not None]
    if len(launches) < len(made):
        return result, None
    gpu = launches[0].attention.gpu
    return result, Repeats(gpu, _made(out), None if lse is None else _made(lse), launches).again


def _made(result: torch.Tensor) -> _Made:
    return tuple(result.shape), result.stride(), result.dtype


def _launch(
    call: Call,
    problem: Problem,
    kind: Kind,
    key: tuple,
    inputs: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> Launch | None:
    """Run a call for one kind of its sequences; None if this cannot be repeated."""
    ready = _get_ready(call, kind.problem, *key)
    config = ready.config
    partial = _partial(
        call, problem, ready.plan, config, (out.shape[0], out.shape[1], out.shape[2])
    )
    work = kernel_side(config).prepare(
        call, problem, kind, ready.plan, config, ready.gpu, ready.spec, out, lse, partial
    )
    kernel, grid, args, constants, options, settle = work
    # Without rows there is nothing to write, and the kernel that merges parts does not run either.
    grid = grid if out.shape[0] else 0
    attention = binaries.launch(
        kernel, grid, args, constants, options, ready.gpu, call.q.device, settle
    )
    merge = None
    if isinstance(partial, Partial) and ready.plan.cut == "parts":
        merge = merge_partials(partial.out, partial.lse, out, lse, ready.gpu, partial.counts)
    if attention is None:
        return None
    repeat = Repeat(attention)
    given = [x.data_ptr() for x in (*inputs, out, lse, *(partial or ())) if x is not None]
    if repeat.addresses != given:  # an argument had to be copied into another layout
        return None
    kept = list(partial or ())
    has_counters = ready.plan.cut == "shares" or (kept and config.kernel == HOPPER)
    counters = kept.pop().numel() if has_counters else 0
    return Launch(
        repeat, None if merge is None else Repeat(merge),
        [x.data_ptr() - kept[0].data_ptr() for x in kept], sum(x.numel() for x in kept), counters,
    )  # fmt: skip


def _partial(
    call: Call,
    problem: Problem,
    plan_: Plan,
    config: KernelConfig,
    shape: tuple[int, int, int],
) -> Partial | tuple[torch.Tensor] | None:
    """Memory beside the result: for partial ones, or for Hopper's kernel two counters."""
    tokens, heads, dim = shape
    place, shared = place_of(call.q), not call.is_operator
    if config.kernel == HOPPER:
        is_drawn = "drawn" in config.form
        return (take_counters(place, call.q, 2, shared=shared),) if is_drawn else None
    if plan_.cut == "":
        return None
    if plan_.cut == "shares":
        pieces = 2 * share_programs(plan_, config, problem)
        rows, block_dv = pieces * config.block_m, whole_block(dim)
        scratch = take(place, call.q, rows * (block_dv + 1), shared=shared)
        out, lse = scratch[: rows * (block_dv + 1)].split((rows * block_dv, rows))
        return Partial(out, lse, take_counters(place, call.q, pieces, shared=shared))
    parts = plan_.num_splits
    sizes = parts * tokens * heads * dim, parts * tokens * heads, tokens * heads
    scratch = take(place, call.q, sum(sizes), shared=shared)
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
