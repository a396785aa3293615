"""What public calls would launch on a GPU that is not there, and a list of calls that covers it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

import tritonattn
from tritonattn import binaries, launch
from tritonattn import device as devices
from tritonattn.device import Device
from tritonattn.errors import UnsupportedError
from tritonattn.flash_attn.append import place
from tritonattn.plan import HOPPER, PORTABLE
from tritonattn.problem import Problem
from tritonattn.tuning import heuristics
from tritonattn.tuning.config import KernelConfig, shared_memory
from tritonattn.tuning.heuristics import heuristic

fp16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
e4m3, e5m2, e4m3_fnuz = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz


class Launch(NamedTuple):
    """The arguments of ``binaries.launch``, and how much shared memory attention should take."""

    kernel: Any
    grid: int
    args: tuple
    constants: dict[str, object]
    options: binaries.Options
    estimate: int | None

    @property
    def key(self) -> tuple:
        signature = binaries._signature(self.args)
        # By name, as Gluon's kernels cannot be hashed where Triton's are interpreted.
        name = self.kernel.__name__
        return name, tuple(self.constants.values()), signature, self.options


@contextlib.contextmanager
def recorded(
    device: Device, configure: Callable[[Problem, Device], KernelConfig] = heuristic
) -> Iterator[list[Launch]]:
    """Inside, calls with CPU tensors go their way as on ``device`` and are listed, not run."""
    launches: list[Launch] = []
    estimates: list[int] = []
    make_spec = launch.make_spec

    def estimate(problem, plan, config, *rest):
        estimates.append(shared_memory(config, problem, device))
        return make_spec(problem, plan, config, *rest)

    def record(kernel, grid, args, constants, options, *_) -> None:
        known = estimates.pop() if estimates else None
        launches.append(Launch(kernel, grid, args, dict(constants), options, known))

    launch.forget()
    try:
        with (
            mock.patch.object(launch, "lookup", configure),
            mock.patch.object(launch, "make_spec", estimate),
            mock.patch.object(binaries, "launch", record),
            mock.patch.object(devices, "describe", return_value=device),
        ):
            yield launches
    finally:
        launch.forget()


@dataclass(frozen=True)
class Case:
    """One public call.  ``extras``: names of options, or of what is unusual about the tensors."""

    name: str
    function: str
    dims: tuple[int, int] = (128, 128)
    extras: str = ""
    dtype: torch.dtype = bf16  # float16 where the GPU has no bfloat16
    cache: torch.dtype | None = None
    group: int = 4
    q_len: int = 2048
    page: int = 16
    kernel: str = PORTABLE  # the one that attends, whatever would be chosen

    @property
    def must_not_spill(self) -> bool:
        return self.dtype.itemsize == 2 and max(self.dims) <= 128

    def launches(self, device: Device) -> list[Launch]:
        dtype = self.dtype if device.has_bf16 or self.dtype != bf16 else fp16
        with recorded(device, self.configure) as launches:
            try:
                prepare(self, dtype)()
            except UnsupportedError:  # heads wider than 256 need more than sm_75 has
                if max(self.dims) <= 256:
                    raise
        return launches

    def configure(self, problem: Problem, device: Device) -> KernelConfig:
        if self.kernel == HOPPER:
            return heuristics.hopper(problem)
        return heuristics.portable(problem, device)


ALL = "window chunk softcap alibi sinks query_scale lse"
DECODE = {"function": "paged_attention", "q_len": 1}
PAGED = {"function": "paged_attention"}
PREFIX = {"function": "prefix_attention"}
VARLEN = {"function": "varlen_attention"}
LATENT = {"dims": (576, 512), "group": 16}

CORE = [
    Case("causal", **VARLEN),
    Case("causal, D 64", dims=(64, 64), **VARLEN),
    Case("not causal, lse", extras="full lse", **VARLEN),
    Case("all options", extras=ALL, **VARLEN),
    Case("window, D 80", dims=(80, 80), extras="window", **VARLEN),
    Case("causal, D 256", dims=(256, 256), **VARLEN),
    Case("causal, D 192/128", dims=(192, 128), **VARLEN),
    Case("float32, D 64", dims=(64, 64), dtype=f32, **VARLEN),
    Case("prefix", **PREFIX),
    Case("prefix, all options, e4m3, page 24", extras=ALL, cache=e4m3, page=24, **PREFIX),
    Case("chunked prefill", **PAGED),
    Case("speculative tree", extras="tree lse", q_len=8, **PAGED),
    Case("decode", extras="unsplit", **DECODE),
    Case("decode, split", extras="lse", **DECODE),
    Case("decode, sinks and window, D 64", dims=(64, 64), extras="sinks window", **DECODE),
    Case("decode, all options, e4m3, page 24", extras=ALL, cache=e4m3, page=24, **DECODE),
    Case("decode, D 576/512", **LATENT, **DECODE),
    Case("decode, D 576/512, latent", extras="latent", **LATENT, **DECODE),
    Case("decode, float32", dtype=f32, **DECODE),
    Case("write", function="write_kv_cache"),
    Case("write, e4m3", function="write_kv_cache", cache=e4m3, extras="scales"),
    Case("gather, e4m3", function="gather_kv_cache", cache=e4m3, extras="scales"),
    Case("append", function="append", q_len=1),
]
MORE = [
    Case("fp16", dtype=fp16, **VARLEN),
    Case("chunk, D 96", dims=(96, 96), extras="chunk", **VARLEN),
    Case("softcap and alibi", extras="softcap alibi", **VARLEN),
    Case("all options, tree", extras=ALL + " tree", **VARLEN),
    Case("all options, D 256", dims=(256, 256), extras=ALL, **VARLEN),
    Case("rows off 16 bytes", dims=(72, 72), extras="unaligned", **VARLEN),
    Case("float32, D 128", dtype=f32, **VARLEN),
    Case("float32, all options, D 256", dims=(256, 256), extras=ALL, dtype=f32, **VARLEN),
    Case("D 576/512", **LATENT, **VARLEN),
    Case("prefix, D 256", dims=(256, 256), **PREFIX),
    Case("prefix, tree, e5m2", extras="tree", cache=e5m2, q_len=16, **PREFIX),
    Case("prefix, all options, tree, e4m3", extras=ALL + " tree", cache=e4m3, **PREFIX),
    Case("chunked prefill, e4m3, ragged", extras="ragged scales", cache=e4m3, **PAGED),
    Case("five queries, D 256", dims=(256, 256), extras="sinks", q_len=5, **PAGED),
    Case("decode, fp16, e5m2", dtype=fp16, cache=e5m2, **DECODE),
    Case("decode, e4m3, D 16", dims=(16, 16), cache=e4m3, **DECODE),
    Case("decode, e4m3, D 80", dims=(80, 80), cache=e4m3, **DECODE),
    Case("decode, e5m2, D 96", dims=(96, 96), cache=e5m2, **DECODE),
    Case("decode, e4m3 fnuz", cache=e4m3_fnuz, extras="scales", **DECODE),
    Case("decode, one head a KV head, page 256", group=1, page=256, extras="softcap", **DECODE),
    Case("decode, 71 heads a KV head", group=71, dims=(64, 64), extras="alibi", **DECODE),
    Case("decode, D 256", dims=(256, 256), extras="window sinks", **DECODE),
    Case("decode, D 576/512, e4m3", cache=e4m3, **LATENT, **DECODE),
    Case("decode, D 576/512, latent, e4m3", extras="latent scales", cache=e4m3, **LATENT, **DECODE),
    Case("decode, D 96/64, latent, all options, e5m2", dims=(96, 64), extras="latent " + ALL,
         cache=e5m2, **DECODE),
    Case("two queries, D 576/512, latent", extras="latent", q_len=2, **LATENT, **PAGED),
    Case("chunked prefill, D 576/512, latent", extras="latent", **LATENT, **PAGED),
    Case("chunked prefill, D 96/64, latent", dims=(96, 64), extras="latent", **PAGED),
    Case("tree, D 576/512, latent", extras="latent tree", q_len=8, **LATENT, **PAGED),
    Case("decode, float32, D 256", dims=(256, 256), dtype=f32, **DECODE),
    Case("write, rows off 16 bytes", function="write_kv_cache", extras="unaligned"),
    Case("write, e5m2", function="write_kv_cache", cache=e5m2),
    Case("gather", function="gather_kv_cache"),
    Case("append, ragged", function="append", extras="ragged", q_len=1),
]  # fmt: skip

# The kernel for sm_90, which the cases above leave to the portable one.
HOPPER_CORE = [
    Case("Hopper, causal", kernel=HOPPER, **VARLEN),
    Case("Hopper, prefix, all options", extras=ALL, kernel=HOPPER, **PREFIX),
]
HOPPER_MORE = [
    Case("Hopper, fp16, D 64", dims=(64, 64), dtype=fp16, kernel=HOPPER, **VARLEN),
    Case("Hopper, D 96", dims=(96, 96), kernel=HOPPER, **VARLEN),
    Case("Hopper, D 192/128", dims=(192, 128), kernel=HOPPER, **VARLEN),
    Case("Hopper, D 256", dims=(256, 256), kernel=HOPPER, **VARLEN),
    Case("Hopper, not causal, lse", extras="full lse", kernel=HOPPER, **VARLEN),
    Case("Hopper, window, float32 out", extras="window float_out", kernel=HOPPER, **VARLEN),
    Case("Hopper, chunk", extras="chunk", kernel=HOPPER, **VARLEN),
    Case("Hopper, softcap", extras="softcap", kernel=HOPPER, **VARLEN),
    Case("Hopper, alibi, sinks", extras="alibi sinks", kernel=HOPPER, **VARLEN),
    Case("Hopper, all options", extras=ALL, kernel=HOPPER, **VARLEN),
    Case("Hopper, all options, D 64", dims=(64, 64), extras=ALL, kernel=HOPPER, **VARLEN),
    Case("Hopper, all options, D 256", dims=(256, 256), extras=ALL, kernel=HOPPER, **VARLEN),
    Case("Hopper, prefix", kernel=HOPPER, **PREFIX),
    Case("Hopper, prefix, page 256, D 64", dims=(64, 64), page=256, kernel=HOPPER, **PREFIX),
    Case("Hopper, chunked prefill", kernel=HOPPER, **PAGED),
    Case("Hopper, chunked prefill, all options, ragged, page 8", extras=ALL + " ragged", page=8,
         kernel=HOPPER, **PAGED),
]  # fmt: skip
ALL_CASES = CORE + MORE + HOPPER_CORE + HOPPER_MORE


def prepare(
    case: Case, dtype: torch.dtype, *, batch: int = 2, keys: int = 8192
) -> Callable[[], Any]:
    """The public call; its tensors are never touched, so their size costs nothing."""
    has = set(case.extras.split())
    kv_heads, (dim, dim_v) = 2, case.dims
    heads = kv_heads * case.group
    total_q = batch * case.q_len

    def rows(count: int, width: int, depth: int, kind: torch.dtype = dtype) -> torch.Tensor:
        spare = 1 if "unaligned" in has else 0
        return torch.empty(count, width, depth + spare, dtype=kind)[..., :depth]

    def pages(depth: int) -> torch.Tensor:
        pool = rows(case.page * -(-keys // case.page) * batch, kv_heads, depth, case.cache or dtype)
        return pool.view(-1, case.page, *pool.shape[1:])

    def ints(*shape: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind)

    scales: dict[str, Any] = {}
    if "scales" in has:
        scales = {"k_scale": torch.ones(kv_heads), "v_scale": torch.ones(kv_heads)}
    k, v = rows(total_q, kv_heads, dim), rows(total_q, kv_heads, dim_v)
    k_cache = pages(dim)
    v_cache = k_cache[..., :dim_v] if "latent" in has else pages(dim_v)
    table = ints(batch, -(-keys // case.page))
    if case.function == "write_kv_cache":
        slots = ints(total_q, kind=torch.int64)
        return partial(tritonattn.write_kv_cache, k, v, k_cache, v_cache, slots, **scales)
    if case.function == "append":
        ragged = "ragged" in has
        starts, table = (ints(batch + 1), table.long()) if ragged else (None, table)
        return partial(place, ints(batch), starts, case.q_len, total_q, table, case.page)
    if case.function == "gather_kv_cache":
        return partial(
            tritonattn.gather_kv_cache, k_cache, v_cache, table, ints(batch),
            cu_seqlens_k=ints(batch + 1), total_k=keys, out_dtype=dtype, **scales,
        )  # fmt: skip

    options = scales
    if "ragged" in has:
        options |= {"block_indptr": ints(batch + 1)}
        table = table.flatten().long()
    if "full" in has:
        options |= {"causal": False}
    if "window" in has:
        options |= {"window_size": (512, 0)}
    if "chunk" in has:
        options |= {"chunk_size": 8192}
    if "softcap" in has:
        options |= {"softcap": 30.0}
    if "alibi" in has:
        options |= {"alibi_slopes": torch.zeros(heads)}
    if "sinks" in has:
        options |= {"sinks": torch.zeros(heads, dtype=dtype)}
    if "query_scale" in has:
        options |= {"query_scale": torch.zeros(total_q)}
    if "tree" in has:
        options |= {"tree_mask": torch.zeros(total_q, case.q_len, dtype=torch.bool)}
    if "lse" in has:
        options |= {"return_lse": True}
    if "float_out" in has:
        options |= {"out": torch.empty(total_q, heads, dim_v + 1)[..., :dim_v]}
    if case.q_len > 1:
        options |= {"max_seqlen_q": case.q_len}
    if "unsplit" in has:
        options |= {"num_splits": 1}
    q, starts = rows(total_q, heads, dim), ints(batch + 1)
    if case.function == "varlen_attention":
        return partial(tritonattn.varlen_attention, q, k, v, starts, starts, **options)
    cache, lens = (k_cache, v_cache, table), ints(batch)
    if case.function == "prefix_attention":
        return partial(tritonattn.prefix_attention, q, k, v, *cache, starts, lens, **options)
    if case.q_len > 1:
        options |= {"cu_seqlens_q": starts}
    return partial(tritonattn.paged_attention, q, *cache, lens, **options)
