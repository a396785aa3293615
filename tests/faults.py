"""One small call in every way that the package can be asked for it.

A Path is one of the three functions with one way to cut its keys up, so that a fault seen in one
kernel of another project is looked for in all of ours.  Memory that belongs to no visible key is
NaN, and so is what torch allocates during the call.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import hopper
import pytest
import torch
from torch import Tensor

import tritonattn
from tritonattn import reference, testing
from tritonattn.testing import Case, cumulative
from tritonattn.tuning.config import KernelConfig
from tritonattn.tuning.store import force

VARLEN, PREFIX, PAGED = "varlen_attention", "prefix_attention", "paged_attention"
FUNCTIONS = (VARLEN, PREFIX, PAGED)
Args = tuple[Any, ...]
Options = dict[str, Any]


@dataclass(frozen=True)
class Path:
    """A function, how its keys are cut up, and the dtype that a probe has."""

    function: str
    num_splits: int = 1
    small_tiles: bool = False  # 16 by 16: a few keys make several tiles
    plain_decode: bool = False  # without cu_seqlens_q where every sequence has one query
    dtype: torch.dtype = torch.float16
    on_hopper: bool = False  # by its own kernel, where that can serve

    def __str__(self) -> str:
        parts = [self.function.removesuffix("_attention")]
        parts += ["small_tiles"] * (self.small_tiles and self.num_splits == 1)
        parts += [f"{self.num_splits}_splits"] * (self.num_splits > 1)
        parts += ["hopper"] * self.on_hopper
        return "-".join(parts)

    def config(self) -> contextlib.AbstractContextManager[Any]:
        if self.on_hopper:
            return hopper.preferred()
        if self.small_tiles:
            return force(KernelConfig(block_m=16, block_n=16, pack=1, num_warps=4, num_stages=1))
        return contextlib.nullcontext()

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The function, with this path's splits unless ``options`` has others."""
        with self.config(), nan_scratch():
            options = {"num_splits": self.num_splits} | options
            return getattr(tritonattn, self.function)(*args, **options)

    @property
    def __name__(self) -> str:  # how ``testing.check`` finds the oracle
        return self.function


def _paths(*functions: str) -> list[Path]:
    return [
        path
        for f in functions
        for path in (
            Path(f),
            Path(f, small_tiles=True, plain_decode=True, dtype=torch.bfloat16),
            Path(f, num_splits=3, small_tiles=True, plain_decode=True),
            *[Path(f, on_hopper=True)] * hopper.is_here(),
        )
    ]


PATHS = _paths(*FUNCTIONS)
CACHED_PATHS = _paths(PREFIX, PAGED)
every_path = pytest.mark.parametrize("path", PATHS, ids=str)
every_cached_path = pytest.mark.parametrize("path", CACHED_PATHS, ids=str)
every_function = pytest.mark.parametrize("function", FUNCTIONS)


@contextlib.contextmanager
def nan_scratch() -> Iterator[None]:
    """Floating-point memory that torch allocates without a value inside is full of NaN."""
    is_on = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_on, warn_only=warns)


def check(path: Path, args: Args, options: Options, **how: Any) -> Any:
    """The call's result, if it is the oracle's within the error budget; ``out`` starts as NaN."""
    return testing.check(path, *args, **{"return_lse": True} | options, **how)


def check_case(
    path: Path, k_lens: Sequence[int], q_lens: Sequence[int], device: Any, /, **fields: Any
) -> Any:
    """``check`` of a Case whose ``k_lens`` count all keys, new ones behind cached ones."""
    return check(path, *case(path, k_lens, q_lens, **fields).build(device))


def case(path: Path, k_lens: Sequence[int], q_lens: Sequence[int], /, **fields: Any) -> Case:
    if path.function == PREFIX:
        k_lens = [k - q for k, q in zip(k_lens, q_lens, strict=True)]
    one_each = path.function == PAGED and path.plain_decode and set(q_lens) == {1}
    return Case(path.function, tuple(k_lens), None if one_each else tuple(q_lens), **fields)


# The mask, seen


def sees(path: Path, sequences: Sequence[tuple[int, int, Sequence[Sequence[int]]]]) -> bool:
    """Whether the path can be asked: with new tokens behind the cached ones no row is before 0."""
    return path.function != PREFIX or all(lq <= lk for lq, lk, _ in sequences)


def assert_sees(
    path: Path,
    sequences: Sequence[tuple[int, int, Sequence[Sequence[int]]]],
    device: torch.device,
    /,
    page_size: int = 8,
    **options: Any,
) -> None:
    """``sequences``: queries, keys, and the keys that each query sees.

    All weights are equal and the value of key j is the unit vector e_j, so row i is 1/n at each of
    the n keys that it sees, and its lse ln n.
    """
    fields: dict[str, Any] = {"heads": (1, 1), "head_dims": (16, 64), "dtype": path.dtype}
    q_lens, k_lens, seen = zip(*sequences, strict=True)
    assert max(k_lens) <= 64
    assert [len(rows) for rows in seen] == list(q_lens)
    args, built = case(
        path, k_lens, q_lens, **fields, page_size=page_size, probe=True, poison="nan",
        options=options,
    ).build(device)  # fmt: skip
    rows = [keys for rows in seen for keys in rows]
    out = torch.zeros(len(rows), 1, 64, dtype=torch.float64)
    lse = torch.full((1, len(rows)), -math.inf, dtype=torch.float64)
    for i, keys in enumerate(rows):
        if len(keys):
            out[i, 0, list(keys)] = 1 / len(keys)
            lse[0, i] = math.log(len(keys))
    assert_result(path, args, built, out, lse)


# Results worked out by hand


def arrange(
    path: Path,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    device: Any,
    /,
    q_lens: Sequence[int] | None = None,
    k_lens: Sequence[int] | None = None,
    page_size: int = 4,
    cache_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Args, Options]:
    """The call of packed rows, one sequence unless lengths say otherwise.

    Cached keys lie on scattered pages, and all memory around them is NaN.
    """
    lay = Tensor.contiguous
    if path.on_hopper:
        page_size, lay = max(8, page_size), on_16_bytes  # the least that its kernel takes
    q_lens = [len(q)] if q_lens is None else list(q_lens)
    k_lens = [len(k)] if k_lens is None else list(k_lens)
    q, cu_q = q.to(device), cumulative(q_lens, device)
    if path.function == VARLEN:
        k, v = (lay(x.to(device)) for x in (k, v))
        return (q, k, v, cu_q, cumulative(k_lens, device)), options
    cached = k_lens
    if path.function == PREFIX:
        cached = [n - lq for n, lq in zip(k_lens, q_lens, strict=True)]
        assert min(cached) >= 0
    gen = testing.generator(0)
    table, num_pages = testing.block_table(tuple(cached), page_size, generator=gen, device=device)
    caches = [
        lay(torch.zeros(num_pages, page_size, *x.shape[1:], dtype=x.dtype, device=device))
        for x in (k, v)
    ]
    new: list[list[Tensor]] = [[], []]
    start = 0
    for row, old, n in zip(table.cpu(), cached, k_lens, strict=True):
        for x, cache, fresh in zip((k, v), caches, new, strict=True):
            j = torch.arange(old)
            cache[row[j // page_size].long(), j % page_size] = x[start : start + old].to(device)
            fresh.append(x[start + old : start + n].to(device))
        start += n
    if cache_dtype is not None:
        caches = [
            reference.quantise(cache.flatten(0, 1), cache_dtype).view(cache.shape)
            for cache in caches
        ]
    lens = torch.tensor(cached, dtype=torch.int32, device=device)
    if path.function == PREFIX:
        args: Args = (q, *(lay(torch.cat(x)) for x in new), *caches, table, cu_q, lens)
    else:
        args = (q, *caches, table, lens)
        if not (path.plain_decode and set(q_lens) == {1}):
            options["cu_seqlens_q"] = cu_q
    testing.poison(path.function, args, options)
    return args, options


def on_16_bytes(x: Tensor) -> Tensor:
    """``x`` with room behind its rows, so that each starts on 16 bytes."""
    step = 16 // x.element_size()
    room = x.new_zeros(*x.shape[:-1], -(-x.shape[-1] // step) * step)
    return room[..., : x.shape[-1]].copy_(x)


def rows(
    logits: Sequence[float],
    values: Sequence[float] | Tensor,
    *,
    lq: int = 1,
    heads: int = 1,
    dtype: torch.dtype = torch.float16,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of one sequence and KV head: every query's product with key j is ``logits[j]``."""
    q = torch.zeros(lq, heads, 16, dtype=dtype)
    q[..., 0] = 1.0
    k = torch.zeros(len(logits), 1, 16, dtype=dtype)
    k[:, 0, 0] = torch.tensor(logits, dtype=dtype)
    v = torch.as_tensor(values, dtype=dtype)
    return q, k, v.reshape(len(logits), 1, v.shape[-1] if v.dim() > 1 else 1)


def half(args: Args, dim_v: int) -> Tensor:
    """A float16 ``out`` for float32 inputs.

    PyTorch's own error in a few float32 numbers may be 0 by luck, and is then no measure.
    """
    return torch.empty(*args[0].shape[:2], dim_v, dtype=torch.float16, device=args[0].device)


def assert_result(
    path: Path,
    args: Args,
    options: Options,
    out: Any,
    lse: Any = None,
) -> None:
    """The call gives ``out`` and ``lse``, numbers that broadcast, within the budget."""
    oracle_of = getattr(reference, path.function)
    dtype = args[0].dtype
    to_oracle = {key: x for key, x in options.items() if key != "out"} | {"return_lse": True}
    fair, fair_lse = oracle_of(*args, **to_oracle, compute_dtype=dtype)
    actual, actual_lse = path(*args, **options, return_lse=True)
    out_dtype = options["out"].dtype if "out" in options else dtype
    note = testing.describe_call(path.function, args, options)
    factor = testing.error_factor(args, options)
    for name, got, right, same_dtype, its_dtype in (
        ("out", actual, out, fair, out_dtype),
        ("lse", actual_lse, lse, fair_lse, torch.float32),
    ):
        if right is not None:
            expected = torch.as_tensor(right, dtype=torch.float64, device=got.device)
            testing.assert_close(
                got, expected.expand(got.shape), same_dtype,
                dtype=its_dtype, factor=factor, name=name, note=note,
            )  # fmt: skip


# Processes of their own


def run_script(
    source: str, *argv: str, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Run Python source, which ends by printing OK, in a process of its own.

    A variable of the environment that is None is taken out.
    """
    folders = (FilePath(__file__).parent, FilePath(tritonattn.__file__).parents[1])
    variables: dict[str, str | None] = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "TRITONATTN_QUIET": "1",
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), *argv],
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        check=False,
    )
    said = f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, said
    assert done.stdout.rstrip().endswith("OK"), said
    return done


def assert_oracle(function: str, args: Args, options: Options, out: Tensor, lse: Tensor) -> None:
    """``out`` and ``lse``, made from these arguments before, are the oracle's within the budget."""
    oracle_of = getattr(reference, function)
    options = options | {"return_lse": True, "out": None}
    oracle, oracle_lse = oracle_of(*args, **options)
    fair, fair_lse = oracle_of(*args, **options, compute_dtype=args[0].dtype)
    note = testing.describe_call(function, args, options)
    factor = testing.error_factor(args, options)
    testing.assert_close(out, oracle, fair, dtype=out.dtype, factor=factor, note=note)
    how: Options = {"dtype": torch.float32, "factor": factor, "name": "lse", "note": note}
    testing.assert_close(lse, oracle_lse, fair_lse, **how)
