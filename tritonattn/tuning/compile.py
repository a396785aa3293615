"""Compiling a problem for any GPU, with none at hand, and reading what the binary takes."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import binaries
from ..call import Call
from ..device import Device
from ..plan import HOPPER, Kind, Plan
from ..problem import Problem
from .config import KernelConfig


@dataclass(frozen=True)
class Report:
    """What one binary takes.  Registers and spills are a thread's."""

    shared: int
    registers: int
    spill_bytes: int
    spills_in_loops: int = 0  # instructions
    tensor_memory: int = 0  # columns, of the 512 that Blackwell has


def example_call(problem: Problem) -> Call:
    """Tiny CPU tensors of the problem's dtypes and options: what a binary depends on."""
    heads = problem.num_kv_heads * problem.group
    ints = torch.zeros(2, dtype=torch.int32)
    mask = problem.mask
    call = Call(
        problem.function,
        q=torch.empty(1, heads, problem.head_dim, dtype=problem.dtype),
        out=torch.empty(1, heads, problem.head_dim_v, dtype=problem.out_dtype),
        cu_seqlens_q=None if problem.is_decode else ints,
        causal=mask.causal,
        window_size=(1 if mask.has_left else None, 1 if mask.has_right else None),
        chunk_size=1 if mask.has_chunk else None,
        tree_mask=torch.zeros(1, 1, dtype=torch.bool) if mask.has_tree else None,
        softcap=1.0 if problem.has_softcap else 0.0,
        alibi_slopes=torch.zeros(heads) if problem.has_alibi else None,
        sinks=torch.zeros(heads, dtype=problem.dtype) if problem.has_sinks else None,
        query_scale=torch.zeros(1) if problem.has_query_scale else None,
    )
    if problem.has_new:
        call.k = torch.empty(1, problem.num_kv_heads, problem.head_dim, dtype=problem.dtype)
        call.v = torch.empty(1, problem.num_kv_heads, problem.head_dim_v, dtype=problem.dtype)
    if problem.cache_dtype is None:
        call.cu_seqlens_k = ints
    else:
        shape = (1, problem.page_size, problem.num_kv_heads)
        call.k_cache = torch.empty(*shape, problem.head_dim, dtype=problem.cache_dtype)
        call.v_cache = torch.empty(*shape, problem.head_dim_v, dtype=problem.cache_dtype)
        if problem.is_latent:
            call.v_cache = call.k_cache[..., : problem.head_dim_v]
        call.block_table = torch.zeros(1, 1, dtype=torch.int32)
        if problem.has_new:
            call.context_lens = ints
        else:
            call.seq_lens = ints
    return call


def compile_attention(problem: Problem, config: KernelConfig, plan: Plan, device: Device) -> Report:
    """Compile the attention kernel for ``device``; raises what Triton's compiler raises."""
    from ..launch import kernel_side
    from ..portable import Partial

    call = example_call(problem)
    assert call.out is not None
    partial: Partial | tuple[torch.Tensor] | None = None
    if config.kernel == HOPPER:
        partial = (torch.zeros(2).int(),) if "drawn" in config.form else None
    elif plan.cut:
        lse, counts = torch.empty(1, call.out.shape[1], 1), torch.zeros(1, 1).int()
        partial = Partial(call.out[None].float(), lse, counts)
    side = kernel_side(config)
    spec = side.make_spec(problem, plan, config, device, False, problem.rows_aligned)
    work = side.prepare(
        call, problem, Kind(problem), plan, config, device, spec, call.out, None, partial
    )
    binary = binaries.compile_for(work.kernel, work.args, work.constants, work.options, device)
    return report(binary)


def report(binary) -> Report:
    """Read a compiled kernel: memory from its metadata, registers and spills from its code."""
    metadata, asm = binary.metadata, binary.asm
    columns = getattr(metadata, "tmem_size", None) or 0
    if "cubin" in asm:
        registers, stack, code = _disassemble(asm["cubin"])
        label, branch = r"\s*(\.L_x_\d+):", r"BRA `\((\.L_x_\d+)\)"
        spill = r"\b(LDL|STL)\b"
    else:
        code = asm["amdgcn"]
        counts = re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", code)
        number = {key: int(value) for key, value in counts}
        registers, stack = number["vgpr_count"], number["private_segment_fixed_size"]
        label, branch = r"(\.LBB\d+_\d+):", r"branch\S*\s+(\.LBB\d+_\d+)"
        spill = r"\bscratch_|Folded (Spill|Reload)"
    looped = _in_loops(code, label, branch, spill) if stack else 0
    return Report(metadata.shared, registers, stack, looped, columns)


def _disassemble(cubin: bytes) -> tuple[int, int, str]:
    """(registers, stack, code).  Kernels here have no arrays of their own: a stack is spills."""
    import triton

    def run(tool, *arguments: str | Path) -> str:
        command = [tool.path, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    tools = triton.knobs.nvidia
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = run(tools.cuobjdump, "-res-usage", path)
        found = re.search(r"REG:(\d+)\s+STACK:(\d+)", usage)
        if found is None:
            raise RuntimeError(f"cuobjdump told no resources: {usage!r}")
        registers, stack = int(found[1]), int(found[2])
        return registers, stack, run(tools.nvdisasm, "-c", path) if stack else ""


def _in_loops(code: str, label: str, branch: str, wanted: str) -> int:
    """How many lines that match ``wanted`` stand between a label and a later branch to it."""
    lines = code.splitlines()
    labels: dict[str, int] = {}
    looped = set[int]()
    for number, line in enumerate(lines):
        if found := re.match(label, line):
            labels[found[1]] = number
        elif (found := re.search(branch, line)) and found[1] in labels:
            looped.update(range(labels[found[1]], number))
    return sum(bool(re.search(wanted, lines[number])) for number in looped)
