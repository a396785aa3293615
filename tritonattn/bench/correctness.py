"""Whether a result is right, on a sample of rows: the whole float64 oracle would take hours.

Row i of a causal sequence sees no key past its position ``p``, so a block of rows that ends at
position p is a sequence of its own with those queries and the first p + 1 keys: every mask, bias
and position stays what it was.  A sample is such a block for the query heads of one KV head, its
keys taken out of their pages by plain indexing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..call import Call
from ..inputs import cumulative
from ..testing import Budget, error_factor
from .cases import Case

ROWS = 16  # of a sample, at most
TILE = 128  # queries: no kernel's tile has more, and where one ends is a place for faults
SEQUENCES = 8
# Peers are here to be compared with, and round in their own ways: all that matters of them is that
# they compute the same thing.
PEER_LENIENCY = 4.0


@dataclass(frozen=True)
class Sample:
    sequence: int
    start: int  # first row, counted from the sequence's first query
    rows: int
    kv_head: int


class Wrong(Exception):
    """The result is not attention's; the message says where."""


def samples(case: Case, seed: int = 0) -> list[Sample]:
    """Ends, beginnings, middles and seams of the longest, the shortest and some other sequences."""
    draw = random.Random(seed)
    order = sorted(range(case.batch), key=lambda b: (case.keys[b], case.queries[b]))
    wanted = {order[0], order[-1], *draw.sample(order, min(case.batch, SEQUENCES - 2))}
    heads = _cycle(case.heads[1], draw)
    # Without the causal rule, only a block at the end keeps its positions; where nothing depends on
    # positions, all rows see the same.
    anywhere = case.causal or not (case.window or case.chunk or case.alibi)
    chosen = []
    for b in sorted(wanted):
        lq = case.queries[b]
        rows = min(ROWS, lq)
        starts = {lq - rows}
        if anywhere and lq > rows:
            starts |= {0, draw.randrange(lq - rows)}
            if lq >= 2 * TILE:
                starts.add(TILE * draw.randint(lq // TILE // 2, lq // TILE - 1) - rows // 2)
        chosen += [Sample(b, start, rows, next(heads)) for start in sorted(starts)]
    return chosen


def _cycle(heads: int, draw: random.Random) -> Iterator[int]:
    """All KV heads in some order, the first and the last soon, again and again."""
    while True:
        middle = list(range(1, heads - 1))
        draw.shuffle(middle)
        yield from dict.fromkeys([heads - 1, 0, *middle])


class Oracle:
    """The truth about one call, computed once for all candidates."""

    def __init__(self, case: Case, call: Call, seed: int = 0) -> None:
        self.case, self.call = case, call
        self.samples = samples(case, seed)
        self.budgets = [self._budgets(sample) for sample in self.samples]

    def check(self, result: Any, *, is_peer: bool = False) -> None:
        """Raise Wrong unless ``out``, or ``(out, lse)``, is finite and right at every sample."""
        case, call = self.case, self.call
        out, lse = result if isinstance(result, (tuple, list)) else (result, None)
        out = out.reshape(case.total_q, case.heads[0], case.head_dims[1])
        if not bool(out.isfinite().all()):
            raise Wrong(f"{int((~out.isfinite()).sum())} of {out.numel()} values are not finite")
        factor = error_factor((call.k_cache,), {"softcap": call.softcap})
        factor *= PEER_LENIENCY if is_peer else 1.0
        group = case.heads[0] // case.heads[1]
        for sample, (of_out, of_lse) in zip(self.samples, self.budgets, strict=True):
            rows = _span(sum(case.queries[: sample.sequence]) + sample.start, sample.rows)
            heads = _span(sample.kv_head * group, group)
            note = f"sequence {sample.sequence}, rows from {sample.start}, heads {heads}"
            try:
                of_out.check(out[rows, heads], factor, note)
                if lse is not None and not is_peer:
                    of_lse.check(lse[heads, rows], factor, note)
            except AssertionError as error:
                raise Wrong(" ".join(str(error).split())) from error

    def _budgets(self, sample: Sample) -> tuple[Budget, Budget]:
        (out, lse), fair = (
            self._attend(sample, torch.float64),
            self._attend(sample, self.case.dtype),
        )
        return (
            Budget(out, fair[0], dtype=self.case.dtype),
            Budget(lse, fair[1], dtype=torch.float32, name="lse"),
        )

    def _attend(self, sample: Sample, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        case, call, b = self.case, self.call, sample.sequence
        group = case.heads[0] // case.heads[1]
        heads = _span(sample.kv_head * group, group)
        first = sum(case.queries[:b]) + sample.start
        rows = _span(first, sample.rows)
        after = case.queries[b] - sample.start - sample.rows
        k, v = _keys(case, call, b, sample.kv_head)
        if case.causal:
            k, v = k[: len(k) - after], v[: len(v) - after]
        device = call.q.device
        result = reference.varlen_attention(
            call.q[rows, heads],
            k,
            v,
            cumulative([sample.rows], device),
            cumulative([len(k)], device),
            compute_dtype=dtype,
            causal=call.causal,
            window_size=call.window_size,
            chunk_size=call.chunk_size,
            softcap=call.softcap,
            alibi_slopes=None if call.alibi_slopes is None else call.alibi_slopes[heads],
            sinks=None if call.sinks is None else call.sinks[heads],
            query_scale=None if call.query_scale is None else call.query_scale[rows],
            return_lse=True,
        )
        assert isinstance(result, tuple)
        return result


def _span(start: int, length: int) -> slice:
    return slice(start, start + length)


def _keys(case: Case, call: Call, b: int, kv_head: int) -> tuple[Tensor, Tensor]:
    """All keys ``[lk, 1, D]`` and values ``[lk, 1, Dv]`` of a sequence for one KV head."""
    head = _span(kv_head, 1)
    new: list[Tensor] = []
    if call.k is not None and call.v is not None:
        lengths = case.k_lens if case.function == "varlen_attention" else case.queries
        rows = _span(sum(lengths[:b]), lengths[b])
        new = [call.k[rows, head], call.v[rows, head]]
    if call.k_cache is None or call.v_cache is None or call.block_table is None:
        return new[0], new[1]
    j = torch.arange(case.k_lens[b], device=call.q.device)
    pages, offsets = call.block_table[b, j // case.page_size].long(), j % case.page_size
    cached = []
    for cache, scale in ((call.k_cache, call.k_scale), (call.v_cache, call.v_scale)):
        if cache.dtype.itemsize == 1:  # torch cannot index float8 everywhere
            stored = cache.view(torch.uint8)[:, :, kv_head][pages, offsets].view(cache.dtype)
            cached.append(stored.float()[:, None] * (1.0 if scale is None else scale))
        else:
            cached.append(cache[:, :, kv_head][pages, offsets][:, None])
    if not new:
        return cached[0], cached[1]
    return torch.cat([cached[0], new[0]]), torch.cat([cached[1], new[1]])
