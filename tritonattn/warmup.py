"""Compiling before serving begins what calls of any lengths will use."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import api, kv_cache, rules, settings
from . import device as devices
from .call import Call
from .errors import bad_value
from .inputs import TENSORS
from .plan import kinds, plan, turning_points
from .problem import Problem
from .tuning import store
from .tuning.config import KernelConfig
from .validate import validate

_CACHE_FUNCTIONS = ("write_kv_cache", "gather_kv_cache")


def warmup(
    function: str | Callable[..., Any],
    *,
    dtype: torch.dtype,
    num_kv_heads: int,
    head_dim: int,
    num_heads: int | None = None,
    head_dim_v: int | None = None,
    cache_dtype: torch.dtype | None = None,
    page_size: int = 16,
    max_batch: int = 1,
    max_seqlen_q: int = 1,
    max_seqlen_k: int = 1,
    max_total_q: int | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> int:
    """Compile every binary that calls of ``function`` will use, and return how many that were.

    Which configuration a call gets depends on its lengths, so this goes through all that are
    possible up to the bounds and runs each once, on tiny tensors of its own.  Afterwards no such
    call compiles anything, whether or not it states its bounds.  Binaries are kept on the disk by
    Triton, so that a second process is ready in seconds.

    Args:
        function: one of the three attention functions, ``write_kv_cache`` or ``gather_kv_cache``,
            or its name.
        dtype: of queries and of new keys and values.
        num_kv_heads, head_dim, num_heads, head_dim_v: the layer's; ``num_heads`` is needed for
            attention alone, ``head_dim_v`` defaults to ``head_dim``.
        cache_dtype, page_size: the cache's; None: ``dtype``.
        max_batch: the most sequences in a call.
        max_seqlen_q: the most queries of a sequence.  1 with ``paged_attention`` is plain decode,
            without ``cu_seqlens_q``; more is calls that pass it.
        max_seqlen_k: the most keys of a sequence; where calls do not state it, what a row of the
            block table can hold.
        max_total_q: the most queries in a call, if that is less than ``max_batch`` sequences of
            ``max_seqlen_q``.
        device: None: the current GPU.
        options: the call's own options.  For those that are tensors a tensor of the right dtype, of
            which nothing else matters, or True for the usual dtype: ``sinks=True``,
            ``k_scale=True``, ``block_indptr=True``; ``block_table`` and ``out`` too, where they are
            not int32 and not left out.

    Of one KV head with values of fewer dims than keys, ``paged_attention`` is compiled both for
    values of their own and for latent ones, which are the keys' first dims in the same memory.
    Tensors are taken to have rows that start on 16 bytes, where the head sizes allow that.  On
    Triton's interpreter, which compiles nothing, this does nothing, says so and returns 0.

    Raises ArgumentTypeError or ArgumentValueError for what the function itself would refuse.

    >>> import torch, tritonattn
    >>> from tritonattn.warmup import warmup
    >>> compiled = warmup(
    ...     "paged_attention", dtype=torch.float16, num_heads=8, num_kv_heads=2, head_dim=64,
    ...     max_batch=4, max_seqlen_k=1024,
    ... )
    """
    f = "warmup"
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    known = (*TENSORS, *_CACHE_FUNCTIONS)
    if name not in known:
        raise bad_value(f, "function", f"must be one of {', '.join(known)}", function, "")
    sizes = {
        "num_kv_heads": num_kv_heads, "head_dim": head_dim, "page_size": page_size,
        "max_batch": max_batch, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
    }  # fmt: skip
    if name in TENSORS:
        sizes["num_heads"] = num_heads  # type: ignore[assignment]
    for size, value in sizes.items():
        rules.integer(f, size, value, 1)
    where = torch.device(device) if device is not None else _here()
    gpu = devices.describe(where)
    if gpu.is_interpreter:
        if not settings.QUIET:
            print(
                "tritonattn: warmup does nothing, as kernels run through Triton's interpreter, "
                "which compiles nothing.",
                file=sys.stderr,
            )
        return 0
    from . import binaries

    before = binaries.count()
    layer = _Layer(dtype, num_heads or 0, num_kv_heads, head_dim, head_dim_v or head_dim, where)
    pages = layer.pages(page_size, cache_dtype or dtype)
    if name in _CACHE_FUNCTIONS:
        _touch_cache(name, layer, pages, options)
        return binaries.count() - before
    is_decode = name == "paged_attention" and max_seqlen_q == 1
    most_q = min(max_total_q or max_batch * max_seqlen_q, max_batch * max_seqlen_q)
    bounds = (max_batch, max_seqlen_q, max_seqlen_k, most_q)
    for its_pages in (pages, *layer.latent_pages(name, pages)):
        args, given = _tiny_call(name, layer, its_pages, is_decode, options)
        problem = validate(Call(name, **dict(zip(TENSORS[name], args, strict=True)), **given))
        for config, splits in choices(problem, gpu, *bounds):
            with store.force(config):
                getattr(api, name)(*args, **(given | {"num_splits": splits}))
    return binaries.count() - before


def choices(problem: Problem, gpu: devices.Device, *bounds: int) -> list[tuple[KernelConfig, int]]:
    """Configurations that calls up to the bounds may get, each with the ``num_splits`` for which a
    small call takes the same binary: 0 where keys are shared out, else 1 or 2."""
    found: dict[tuple[KernelConfig, int], None] = {}
    for kind in (kind for sized in _sizes(problem, gpu, *bounds) for kind in kinds(sized, gpu)):
        config = store.find(kind.problem, gpu).config
        its_plan = plan(kind.problem, gpu, config.kernel)
        splits = its_plan.num_splits
        if problem.num_splits < 2:  # else the caller's number
            splits = 0 if its_plan.cut == "shares" else min(splits, 2)
        found[config, splits] = None
    return list(found)


def _sizes(
    problem: Problem,
    gpu: devices.Device,
    max_batch: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    max_total_q: int,
) -> Iterator[Problem]:
    """The problem at all sizes that may differ for planning and tuning."""
    heads = problem.num_kv_heads * problem.group
    # A call that states no bound is bounded by what its tensors hold.
    most_k = {
        "varlen_attention": max_batch * max_seqlen_k,
        "prefix_attention": max_total_q + max_seqlen_k,
    }.get(problem.function, max_seqlen_k)
    lengths = _ends(most_k)
    totals = set(_ends(max_total_q, heads, problem.group))
    for batch in (1, max_batch):
        for turn in turning_points(problem, gpu, batch):
            totals |= {n for n in (turn, turn + 1) if 1 <= n <= max_total_q}
    for total_q in sorted(totals):
        stated = [q for q in _powers(max_seqlen_q) if q <= total_q]
        for max_q in [1] if problem.is_decode else dict.fromkeys([*stated, total_q]):
            fewest = -(-total_q // min(max_q, max_seqlen_q))
            for batch in {fewest, min(total_q, max_batch)}:
                for max_k in lengths:
                    yield dataclasses.replace(
                        problem, batch=batch, total_q=total_q, max_q=max_q, max_k=max_k,
                        capacity_k=max_k,
                    )  # fmt: skip


def _ends(most: int, *units: int) -> list[int]:
    """Both ends of every range, up to ``most``, in which n and its products with ``units`` stay in
    their buckets: whatever changes in one direction inside a range shows at its ends."""
    ends = {1, most}
    for unit in (1, *units):
        for power in _powers(2 * most * unit):
            ends |= {power // unit, power // unit + 1}
    return sorted(n for n in ends if 1 <= n <= most)


def _powers(most: int) -> list[int]:
    """Powers of two from 1 to the first that is not under ``most``."""
    return [1 << i for i in range((most - 1).bit_length() + 1)]


# Tiny tensors; two of everything that a stride goes over, as a stride over one says nothing


@dataclasses.dataclass(frozen=True)
class _Layer:
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    where: torch.device

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.where)

    def keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (self.zeros(2, self.num_kv_heads, d) for d in (self.head_dim, self.head_dim_v))
        return k, v

    def pages(self, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (2, size, self.num_kv_heads)
        k, v = (self.zeros(*shape, d, dtype=dtype) for d in (self.head_dim, self.head_dim_v))
        return k, v

    def latent_pages(
        self, name: str, pages: tuple[torch.Tensor, torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pages of keys that are the values too, if calls of ``name`` may have such."""
        if name == "paged_attention" and self.num_kv_heads == 1 and self.head_dim_v < self.head_dim:
            yield pages[0], pages[0][..., : self.head_dim_v]


def _tiny_call(
    name: str,
    layer: _Layer,
    pages: tuple[torch.Tensor, torch.Tensor],
    is_decode: bool,
    options: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Two sequences, the first with a query and a key; ``options`` become tensors of its sizes."""
    heads, i32 = layer.num_heads, torch.int32
    usual = {
        "alibi_slopes": ((heads,), torch.float32),
        "sinks": ((heads,), layer.dtype),
        "query_scale": ((2,), torch.float32),
        "tree_mask": ((2, 1), torch.bool),
        "k_scale": ((1,), torch.float32),
        "v_scale": ((1,), torch.float32),
        "block_indptr": ((3,), i32),
        "block_table": ((2, 1), i32),
        "out": ((2, heads, layer.head_dim_v), layer.dtype),
    }
    given = {}
    for option, value in options.items():
        if option in usual and (value is True or isinstance(value, torch.Tensor)):
            shape, dtype = usual[option]
            value = layer.zeros(*shape, dtype=dtype if value is True else value.dtype)
        given[option] = value
    table = given.pop("block_table", layer.zeros(2, 1, dtype=i32))
    if given.get("block_indptr") is not None:
        table = table.flatten()
    q, lens = layer.zeros(2, heads, layer.head_dim), layer.zeros(2, dtype=i32)
    starts = torch.tensor([0, 1, 2], dtype=i32, device=layer.where)
    if name == "varlen_attention":
        return (q, *layer.keys(), starts, starts), given
    if name == "prefix_attention":
        return (q, *layer.keys(), *pages, table, starts, lens), given
    if not is_decode:
        given["cu_seqlens_q"] = starts
    return (q, *pages, table, lens), given


def _touch_cache(
    name: str,
    layer: _Layer,
    pages: tuple[torch.Tensor, torch.Tensor],
    options: dict[str, Any],
) -> None:
    scales: dict[str, Any] = {
        option: layer.zeros(1, dtype=torch.float32) + 1.0 if value is True else value
        for option, value in options.items()
    }
    if name == "write_kv_cache":
        slots = scales.pop("slot_mapping", layer.zeros(2, dtype=torch.int64))
        nowhere = torch.full((2,), -1, dtype=slots.dtype, device=layer.where)
        kv_cache.write_kv_cache(*layer.keys(), *pages, nowhere, **scales)
    else:
        table, lens = layer.zeros(2, 1, dtype=torch.int32), layer.zeros(2, dtype=torch.int32)
        starts = layer.zeros(3, dtype=torch.int32)
        kv_cache.gather_kv_cache(*pages, table, lens, cu_seqlens_k=starts, total_k=2, **scales)


def _here() -> torch.device:
    if devices.interpreting():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
