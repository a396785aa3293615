"""A call for Hopper's kernel: its binary, grid, boxes and arguments."""

from __future__ import annotations

import functools

import torch
from triton.experimental.gluon import language as gl

from .arguments import batch_of, masking_of, output, scoring_of, table_of
from .binaries import Options, Work
from .boxes import Box, box
from .call import Call
from .device import Device
from .kernels.hopper.prefill import prefill_kernel
from .kernels.hopper.spec import DRAWN, LANES, MID, TURNS, HopperSpec, boxes
from .plan import Kind, Plan
from .problem import Problem
from .tuning.config import KernelConfig, hopper_blocks, hopper_q_slots

SWITCHES = {
    "plain": 0,
    "turns": TURNS,
    "lanes": LANES,
    "mid": MID,
    "drawn": DRAWN,
}
ROUNDS = 4  # of tiles, a program, that a section of sequences should last
MOST_SEQUENCES = 32  # in a section
L2_BYTES = 32 << 20  # of keys and values that stay in the L2 cache


def prepare(
    call: Call,
    problem: Problem,
    kind: Kind,
    plan: Plan,
    config: KernelConfig,
    gpu: Device,
    spec: HopperSpec,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    memory: tuple[torch.Tensor] | None,
) -> Work:
    """``memory``: the two counters that programs draw tiles from; None: they are dealt out."""
    tiles = problem.total_q // spec.BLOCK_M + problem.batch + 1
    grid = min(gpu.sm_count, tiles * problem.num_kv_heads * problem.group)
    shapes = _shapes(spec)

    def boxed(name: str, tensor: torch.Tensor | None) -> Box | None:
        return None if tensor is None else box(tensor, *shapes[name], call.q)

    args = (
        boxed("q_box", call.q), boxed("k_box", call.k), boxed("v_box", call.v),
        boxed("k_pages", call.k_cache), boxed("v_pages", call.v_cache), table_of(call, problem),
        batch_of(call, problem, kind), scoring_of(call, problem), masking_of(call, problem),
        output(out, lse), None if memory is None else memory[0], section(problem, gpu),
        problem.num_kv_heads,
    )  # fmt: skip
    return Work(
        prefill_kernel, grid, args, {"SPEC": spec},
        Options(config.num_warps, 1),
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _shapes(spec: HopperSpec) -> dict[str, tuple[tuple[int, ...], gl.NVMMASharedLayout]]:
    """Of each box: its shape, and how it lies in shared memory."""
    return {
        name: (shape, gl.NVMMASharedLayout(128, 16, rank=len(shape)))
        for name, shape in boxes(spec).items()
    }


def section(problem: Problem, gpu: Device) -> int:
    """How many sequences' keys are read at about the same time.

    So many that their tiles, the heaviest first, keep the GPU evenly busy, but no more than the L2
    cache holds the keys of one KV head of.
    """
    mean = -(-problem.total_q // max(1, problem.batch))
    tiles = problem.group * max(1, -(-mean // 128))
    widths = problem.head_dim + problem.head_dim_v
    fit = L2_BYTES // (problem.max_k * widths * problem.dtype.itemsize)
    return max(1, min(-(-ROUNDS * gpu.sm_count // tiles), fit, MOST_SEQUENCES))


def make_spec(
    problem: Problem, plan: Plan, config: KernelConfig, gpu: Device, has_lse: bool, aligned: bool
) -> HopperSpec:
    """What selects the machine code of a problem under a configuration."""
    mask = problem.mask
    block_d, block_dv = hopper_blocks(problem)
    return HopperSpec(
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        GROUP=problem.group,
        PAGE_SIZE=problem.page_size,
        STAGES=config.num_stages,
        Q_SLOTS=hopper_q_slots(config, problem),
        FORM=sum(SWITCHES[name] for name in config.form.split("+")),
        HAS_CACHE=problem.has_cache,
        HAS_NEW=problem.has_new,
        HAS_LEFT=mask.has_left,
        HAS_RIGHT=mask.has_right,
        HAS_CHUNK=mask.has_chunk,
        IS_CAUSAL=mask.causal,
        HAS_SOFTCAP=problem.has_softcap,
        HAS_ALIBI=problem.has_alibi,
        HAS_SINK=problem.has_sinks,
        HAS_QUERY_SCALE=problem.has_query_scale,
        HAS_LSE=has_lse,
        OUT_ALIGNED=aligned,
    )
