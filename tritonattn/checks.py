"""Checks of values on the device, for TRITONATTN_CHECK=1 alone: each call then waits for the GPU.

They look at what a kernel would follow and at nothing else: an entry of the block table past a
sequence's length, or before every window, may hold anything.
"""

from __future__ import annotations

import torch

from .call import Call
from .errors import ArgumentValueError, Text, bad_value
from .problem import Problem


def check_values(call: Call, problem: Problem) -> None:
    """Raises for the first entry that would make a kernel read what is not the caller's."""
    f = call.function
    if call.cu_seqlens_q is None:
        lq = torch.ones(problem.batch, dtype=torch.int64)
    else:
        lq = prefix_sums(f, "cu_seqlens_q", call.cu_seqlens_q, problem.total_q, "total_q of q")
    if call.cu_seqlens_k is not None and call.k is not None:
        total_k = call.k.shape[0]
        lk = prefix_sums(f, "cu_seqlens_k", call.cu_seqlens_k, total_k, "total_k of k")
    else:
        lens_name = "seq_lens" if call.seq_lens is not None else "context_lens"
        cached = _on_host(getattr(call, lens_name)).clamp(min=0)
        lk = cached + lq if problem.has_new else cached
        _pages(call, problem, cached, lens_name, _first_keys(call, lq, lk))
    _bounds(call, lq, lk)


def prefix_sums(f: str, name: str, sums: torch.Tensor, total: int, what: str) -> torch.Tensor:
    """The lengths, int64 on the host, of prefix sums within ``total`` rows; ``what`` names them."""
    host = _on_host(sums)
    rule = f"must start at 0, never decrease and end at or before {total} ({what})"
    fix = "Pass the prefix sums of the lengths, torch.cumsum(lengths, 0) after a 0."
    if host[0] != 0:
        raise _bad(f, name, rule, f"{name}[0] is {int(host[0])}", fix)
    lengths = host.diff()
    at = _first(lengths < 0)
    if at is not None:
        was = f"{name}[{at + 1}] is {int(host[at + 1])} after {int(host[at])}"
        raise _bad(f, name, rule, was, fix)
    at = _first(host > total)
    if at is not None:
        raise _bad(f, name, rule, f"{name}[{at}] is {int(host[at])}", fix)
    return lengths


def page_ids(
    f: str,
    table: torch.Tensor,
    indptr: torch.Tensor | None,
    lens: torch.Tensor,
    lens_name: str,
    first_keys: torch.Tensor,
    page_size: int,
    num_pages: int,
) -> None:
    """Pages of keys first_keys[b] <= j < lens[b]: lengths fit the table, ids fit the cache.

    ``lens`` and ``first_keys`` are int64 on the host, none below 0.
    """
    ids = _on_host(table)
    if indptr is None:
        starts = torch.zeros(len(lens), dtype=torch.int64)
        columns = torch.full_like(starts, ids.shape[1])
    else:
        starts, columns = _flat_rows(f, indptr, ids.shape[0])
    at = _first(lens > columns * page_size)
    if at is not None:
        rule = f"must fit the pages that block_table has for a sequence, of {page_size} tokens each"
        was = f"{lens_name}[{at}] is {int(lens[at])} with {int(columns[at])} pages"
        raise _bad(f, lens_name, rule, was, "Give the sequence more pages, or pass its length.")

    pages = (lens + page_size - 1) // page_size
    for b in range(len(lens)):
        if first_keys[b] >= lens[b]:
            continue  # a window, or no query at all, hides every key
        first, last = int(first_keys[b]) // page_size, int(pages[b])
        start = int(starts[b])
        row = ids[b] if indptr is None else ids[start:]
        followed = row[first:last]
        at = _first((followed < 0) | (followed >= num_pages))
        if at is not None:
            place = f"{b}, {first + at}" if indptr is None else f"{start + first + at}"
            rule = f"must hold page ids from 0 to {num_pages - 1} wherever a key is read"
            if num_pages == 0:
                rule = "must not be followed where the cache has no page"
            fix = "Pass ids below num_pages of k_cache, or a shorter length."
            raise _bad(f, "block_table", rule, f"block_table[{place}] is {int(followed[at])}", fix)


def _flat_rows(f: str, indptr: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(where a sequence's pages start, how many there are)."""
    host = _on_host(indptr)
    rule = f"must rise from 0 or more to at most {total} (entries of block_table)"
    fix = "Pass the prefix sums of the sequences' page counts."
    if host[0] < 0:
        raise _bad(f, "block_indptr", rule, f"block_indptr[0] is {int(host[0])}", fix)
    columns = host.diff()
    at = _first(columns < 0)
    if at is not None:
        was = f"block_indptr[{at + 1}] is {int(host[at + 1])} after {int(host[at])}"
        raise _bad(f, "block_indptr", rule, was, fix)
    at = _first(host > total)
    if at is not None:
        raise _bad(f, "block_indptr", rule, f"block_indptr[{at}] is {int(host[at])}", fix)
    return host[:-1], columns


def _pages(
    call: Call, problem: Problem, cached: torch.Tensor, lens_name: str, first: torch.Tensor
) -> None:
    if call.block_table is not None and call.k_cache is not None:
        page_ids(
            call.function,
            call.block_table,
            call.block_indptr,
            cached,
            lens_name,
            first,
            problem.page_size,
            call.k_cache.shape[0],
        )


def _first_keys(call: Call, lq: torch.Tensor, lk: torch.Tensor) -> torch.Tensor:
    """The first key that any query of a sequence sees, which is its first query's; else lk."""
    pos = lk - lq
    first = torch.zeros_like(lk)
    if call.window_size is not None:
        left = call.window_size[0]
        if left is not None and left >= 0:
            first = torch.maximum(first, pos - left)
    if call.chunk_size is not None:
        size = call.chunk_size
        first = torch.maximum(first, torch.div(pos, size, rounding_mode="floor") * size)
    return torch.where(lq > 0, first, lk)


def _bounds(call: Call, lq: torch.Tensor, lk: torch.Tensor) -> None:
    """What the caller said about the longest sequence."""
    for name, lengths, noun in (("max_seqlen_q", lq, "queries"), ("max_seqlen_k", lk, "keys")):
        bound = getattr(call, name)
        at = None if bound is None else _first(lengths > bound)
        if at is not None:
            rule = f"must be at least every sequence's number of {noun}"
            was = f"{name}={bound} and sequence {at} has {int(lengths[at])}"
            raise _bad(call.function, name, rule, was, f"Pass a larger {name}, or None.")
    if call.tree_mask is not None:
        width = call.tree_mask.shape[1]
        at = _first(lq > width)
        if at is not None:
            rule = "must have a column for each new key of a sequence"
            was = f"{width} columns and sequence {at} has {int(lq[at])} new keys"
            raise _bad(call.function, "tree_mask", rule, was, "Pass a wider tree_mask.")


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.int64)


def _first(bad: torch.Tensor) -> int | None:
    at = bad.nonzero()
    return int(at[0, 0]) if len(at) else None


def _bad(f: str, name: str, rule: str, was: str, fix: str) -> ArgumentValueError:
    return bad_value(f, name, rule, Text(was), fix)
