"""What the cache functions ask of their arguments; of values only with TRITONATTN_CHECK=1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import checks, rules, settings
from . import device as devices
from .call import Scale
from .errors import Text, bad_type, bad_value

# Integers that carry a value's bits through torch's indexing, by size.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Writes that passed, by all that they are but addresses and contents, and the launches that such
# writes share: each layer of each decode step asks for the same.  Cleared when full.
_passed: dict[tuple[object, ...], dict[bool, Any]] = {}
_PASSED_LIMIT = 4096


def check_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: Scale,
    v_scale: Scale,
) -> dict[bool, Any] | None:
    """What the launches of all writes like this one share; None where there is no telling.

    Raises for the first rule that is broken.
    """
    facts: list[object] = []
    for x in (k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale):
        if isinstance(x, torch.Tensor) and x.layout == torch.strided:
            facts += (x.shape, x.stride(), x.dtype, x.device)
        else:
            facts += (type(x), x)  # True is no 1.0
    try:
        known = tuple(facts)
        if known in _passed and not torch.is_grad_enabled() and not settings.CHECK:
            return _passed[known]
    except TypeError:  # a list where a tensor belongs, or sizes that are symbols
        known = ()
    _check_write(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    if not known:
        return None
    if len(_passed) >= _PASSED_LIMIT:
        _passed.clear()
    return _passed.setdefault(known, {})


def _check_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: Scale,
    v_scale: Scale,
) -> None:
    f, of = "write_kv_cache", "k_cache"
    where = rules.tensor(f, of, k_cache, "[num_pages, page_size, Hkv, D]").device
    num_heads, head_dim_v = rules.kv_pages(f, k_cache, v_cache, where, of)
    rules.kv_rows(f, k, v, where, of)
    rules.dtype(
        f, "k", k, rules.COMPUTE_DTYPES, "Pass keys in the model's dtype, such as k.half()."
    )
    rules.same_dtype(f, "v", v, k.dtype, "k")
    fix = "Pass a cache of k's dtype or of float8, or k in the cache's dtype."
    rules.dtype(f, of, k_cache, (k.dtype, *rules.FP8_DTYPES), fix)
    fix = "Pass new keys and values with the heads and head sizes of the cache."
    rules.size(f, "k", k, 1, num_heads, "Hkv of k_cache", fix)
    rules.size(f, "k", k, 2, k_cache.shape[3], "D of k_cache", fix)
    rules.size(f, "v", v, 2, head_dim_v, "Dv of v_cache", fix)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        rules.no_overlap(f, name, cache)

    rules.tensor(f, "slot_mapping", slot_mapping, "int32 or int64 [n]")
    fix = "Pass slot_mapping.long()."
    rules.dtype(f, "slot_mapping", slot_mapping, rules.INDEX_DTYPES, fix)
    rules.rank(f, "slot_mapping", slot_mapping, 1, "[n]", "Pass slot_mapping.flatten().")
    rules.unit_stride(f, "slot_mapping", slot_mapping)
    rules.same_device(f, "slot_mapping", slot_mapping, where, of)
    if slot_mapping.shape[0] > k.shape[0]:
        rule = f"must have at most {k.shape[0]} entries, the rows of k"
        fix = f"Pass slot_mapping[:{k.shape[0]}], or a row of k and v for each slot."
        raise bad_value(f, "slot_mapping", rule, slot_mapping, fix)
    _check_scales(f, k_scale, v_scale, num_heads, where, None)
    _check_floats(f, {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache})
    if settings.CHECK:
        slots = k_cache.shape[0] * k_cache.shape[1]
        rule = f"must be below {slots}, num_pages * page_size of k_cache"
        fix = "Pass page * page_size + offset; a negative slot skips its row."
        _check_values(f, "slot_mapping", slot_mapping, None, slots, rule, fix)


def check_gather(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    total_k: int,
    k_scale: Scale,
    v_scale: Scale,
    out_dtype: torch.dtype | None,
) -> torch.dtype:
    """The dtype of the result."""
    f, of = "gather_kv_cache", "k_cache"
    where = rules.tensor(f, of, k_cache, "[num_pages, page_size, Hkv, D]").device
    num_heads, _ = rules.kv_pages(f, k_cache, v_cache, where, of)
    fix = "Pass a cache of a dtype that attention reads."
    rules.dtype(f, of, k_cache, (*rules.COMPUTE_DTYPES, *rules.FP8_DTYPES), fix)
    batch = rules.int32_vector(f, "seq_lens", seq_lens, "[B]", where, of).shape[0]
    rules.block_table(f, block_table, None, batch, where, of)
    rules.int32_vector(f, "cu_seqlens_k", cu_seqlens_k, "[B + 1]", where, of)
    fix = "Pass the prefix sums of the rows that each sequence gets: 0 first, the total last."
    what = f"B + 1, B = {batch} of seq_lens"
    rules.length(f, "cu_seqlens_k", cu_seqlens_k, batch + 1, what, fix)
    rules.integer(f, "total_k", total_k, 0, 2**31 - 1)
    _check_scales(f, k_scale, v_scale, num_heads, where, batch)

    dtype = k_cache.dtype if out_dtype is None else out_dtype
    if dtype != k_cache.dtype and dtype not in rules.COMPUTE_DTYPES:
        rule = f"must be None, {rules.one_of(rules.COMPUTE_DTYPES)}"
        raise bad_type(f, "out_dtype", rule, out_dtype, "Pass the model's dtype.")
    if dtype in rules.FP8_DTYPES and not (k_scale is None and v_scale is None):
        rule = "must be given for a float8 cache with a scale"
        fix = (
            "Pass out_dtype=torch.bfloat16, or leave k_scale and v_scale out for the stored bytes."
        )
        raise bad_value(f, "out_dtype", rule, out_dtype, fix)
    _check_floats(f, {"k_cache": k_cache, "v_cache": v_cache})
    if dtype == torch.bfloat16:
        rules.bfloat16(f, "out_dtype", devices.describe(where))
    if settings.CHECK:
        what = "total_k"
        rows = checks.prefix_sums(f, "cu_seqlens_k", cu_seqlens_k, total_k, what)
        lens = torch.minimum(seq_lens.detach().to("cpu", torch.int64).clamp(min=0), rows)
        num_pages, page_size = k_cache.shape[:2]
        first = torch.zeros_like(lens)
        checks.page_ids(f, block_table, None, lens, "seq_lens", first, page_size, num_pages)
    return dtype


def check_copy(
    caches: torch.Tensor | Sequence[torch.Tensor], block_mapping: torch.Tensor
) -> list[torch.Tensor]:
    """The caches, one or several."""
    f = "copy_blocks"
    if isinstance(caches, torch.Tensor):
        named = [("caches", caches)]
    elif isinstance(caches, list | tuple):
        named = [(f"caches[{i}]", cache) for i, cache in enumerate(caches)]
    else:
        rule = "must be a tensor [num_pages, ...] or a list of them"
        raise bad_type(f, "caches", rule, caches, "Pass [k_cache, v_cache].")
    for name, cache in named:
        _check_pages(f, name, cache)
        rules.no_overlap(f, name, cache)
    _check_mapping(f, block_mapping)
    for name, cache in named:
        rules.same_device(f, "block_mapping", block_mapping, cache.device, name)
        if settings.CHECK:
            _check_page_pairs(f, block_mapping, (name, cache), (name, cache))
    return [cache for _, cache in named]


def check_swap(
    source: torch.Tensor, destination: torch.Tensor, block_mapping: torch.Tensor
) -> None:
    f = "swap_blocks"
    _check_pages(f, "source", source)
    _check_pages(f, "destination", destination)
    rules.no_overlap(f, "destination", destination)
    rules.same_dtype(f, "destination", destination, source.dtype, "source")
    if destination.shape[1:] != source.shape[1:]:
        rule = f"must have the page shape of source, {list(source.shape[1:])}"
        raise bad_value(f, "destination", rule, destination, "Only the number of pages may differ.")
    _check_mapping(f, block_mapping)
    if block_mapping.device != destination.device:
        rules.same_device(f, "block_mapping", block_mapping, source.device, "source")
    if settings.CHECK:
        pair = ("source", source), ("destination", destination)
        _check_page_pairs(f, block_mapping, *pair)


def _check_scales(
    f: str, k_scale: Scale, v_scale: Scale, num_heads: int, where: torch.device, batch: int | None
) -> None:
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        rules.scale(f, name, scale, num_heads, where, batch, of="k_cache")
        if isinstance(scale, torch.Tensor):
            rules.no_grad(f, name, scale)


def _check_floats(f: str, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        rules.no_grad(f, name, tensor)
        if tensor.dtype == torch.bfloat16:
            rules.bfloat16(f, name, devices.describe(tensor.device))


def _check_pages(f: str, name: str, cache: torch.Tensor) -> None:
    rules.tensor(f, name, cache, "[num_pages, ...]")
    if cache.dim() == 0:
        fix = "Pass a tensor whose first axis counts pages."
        raise bad_value(f, name, "must have at least one axis, [num_pages, ...]", cache, fix)
    if cache.dtype.itemsize not in INTEGERS:
        raise bad_type(
            f, name, "must have entries of 1, 2, 4 or 8 bytes", cache, "Pass a real dtype."
        )
    rules.no_grad(f, name, cache)


def _check_mapping(f: str, block_mapping: torch.Tensor) -> None:
    what = "[n, 2] of (source page, destination page)"
    rules.tensor(f, "block_mapping", block_mapping, f"int32 or int64 {what}")
    fix = "Pass block_mapping.long()."
    rules.dtype(f, "block_mapping", block_mapping, rules.INDEX_DTYPES, fix)
    rules.rank(f, "block_mapping", block_mapping, 2, what)
    fix = "Pass one row (source page, destination page) for each copy."
    rules.size(f, "block_mapping", block_mapping, 1, 2, "source and destination", fix)


def _check_page_pairs(
    f: str,
    block_mapping: torch.Tensor,
    source: tuple[str, torch.Tensor],
    destination: tuple[str, torch.Tensor],
) -> None:
    for column, (name, cache) in enumerate((source, destination)):
        num_pages = cache.shape[0]
        rule = f"must hold page ids from 0 to {num_pages - 1} of {name}"
        ids = block_mapping[:, column]
        _check_values(f, "block_mapping", ids, 0, num_pages, rule, "Pass page ids.", f", {column}")
    seen: dict[int, int] = {}
    for i, page in enumerate(block_mapping[:, 1].tolist()):
        if seen.setdefault(page, i) != i:
            rule = "must not have one destination twice"
            got = Text(f"block_mapping[{i}, 1] is {page}, as is block_mapping[{seen[page]}, 1]")
            raise bad_value(f, "block_mapping", rule, got, "Keep the copy that should win.")


def _check_values(
    f: str,
    name: str,
    values: torch.Tensor,
    low: int | None,
    high: int,
    rule: str,
    fix: str,
    column: str = "",
) -> None:
    """Every entry lies in low..high - 1; the error names the first that does not."""
    host = values.detach().to("cpu", torch.int64)
    bad = host >= high
    if low is not None:
        bad |= host < low
    at = bad.nonzero()
    if len(at):
        index = int(at[0, 0])
        got = Text(f"{name}[{index}{column}] is {int(host[index])}")
        raise bad_value(f, name, rule, got, fix)
