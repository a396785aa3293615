"""Calls of ``flash_attn_with_kvcache``, and what they must give: the oracle in plain torch loops.

A sequence's keys are collected one by one from wherever the arguments say they are, so nothing of
what the package does to get there (slots, views, pages) is shared with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from caches import assert_same_memory, twins
from flash import compare
from torch import Tensor

from tritonattn import reference
from tritonattn.flash_attn import flash_attn_with_kvcache
from tritonattn.inputs import FP8_NAN_INF
from tritonattn.testing import block_table, cumulative, generator, kv_pool, normal

F64 = torch.float64


def rotated(x: Tensor, cos: Tensor, sin: Tensor, pos: int, interleaved: bool) -> Tensor:
    """One token ``[heads, D]``, turned pair by pair in float32 and rounded once to its dtype."""
    half = cos.shape[1]
    row = min(max(pos, 0), cos.shape[0] - 1)
    c, s = cos[row].float(), sin[row].float()
    wide, result = x.float(), x.float().clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        result[:, a] = wide[:, a] * c[i] - wide[:, b] * s[i]
        result[:, b] = wide[:, a] * s[i] + wide[:, b] * c[i]
    return result.to(x.dtype)


@dataclass(frozen=True)
class Cached:
    """A call of ``flash_attn_with_kvcache`` as plain values; ``check`` runs and judges it."""

    lens: tuple[int, ...]  # tokens in the cache, left padding included; below 0: padding
    q_lens: int | tuple[int, ...] = 1  # a tuple: packed
    new: int | tuple[int, ...] | None = None  # a tuple: packed; None: nothing is appended
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    page_size: int = 0  # 0: a cache of whole rows
    room: int = 3  # tokens that would still fit the longest sequence
    layout: str = "token_major"
    seqlens: str = "tensor"  # or "int", or "none": the cache is full
    batch_idx: bool = False
    leftpad: tuple[int, ...] | None = None
    rotary: int = 0  # columns of cos and sin
    interleaved: bool = True
    rotary_seqlens: bool = False
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float | None = None
    alibi: int = 0  # 1: [Hq], 2: [B, Hq]
    sinks: str = ""  # the argument's name
    chunk: int = 0
    num_splits: int = 0
    descale: str = ""  # "float", "[Hkv]" or "[B, Hkv]"
    lse: bool = True
    table_name: str = "block_table"
    padding_rows: int = 0  # of packed q and k, past the last sequence
    seed: int = 0

    def __repr__(self) -> str:
        given = [f for f in fields(self) if f.name == "lens" or getattr(self, f.name) != f.default]
        return f"Cached({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in given)})"

    def counts(self, what: int | tuple[int, ...] | None) -> list[int]:
        if isinstance(what, tuple):
            return list(what)
        return [what or 0] * len(self.lens)

    def build(self, device: torch.device) -> dict[str, Any]:
        """The arguments, by name."""
        gen = generator(self.seed)
        how: dict[str, Any] = {"generator": gen, "device": device}
        batch, (heads, kv_heads), (dim, dim_v) = len(self.lens), self.heads, self.head_dims
        after = [max(0, n + new) for n, new in zip(self.lens, self.counts(self.new), strict=True)]
        longest = max(after, default=0) + self.room
        args: dict[str, Any] = {}
        page_size, rows = self.page_size, batch + 2 * self.batch_idx
        if page_size:
            table, rows = block_table(tuple([longest] * rows), page_size, spare_columns=0, **how)
            args[self.table_name] = table
        else:
            page_size = max(longest, 1)
        sizes = (rows, page_size, kv_heads, dim, dim_v, self.layout)
        args["k_cache"], args["v_cache"] = kv_pool(
            *sizes, dtype=self.cache_dtype or self.dtype, **how
        )
        args["q"] = normal(*self._shape(self.q_lens, heads, dim), dtype=self.dtype, **how)
        if isinstance(self.q_lens, tuple):
            args["cu_seqlens_q"] = cumulative(self.q_lens, device)
        if self.new is not None:
            shape = self._shape(self.new, kv_heads, dim)
            args["k"] = normal(*shape, dtype=self.dtype, **how)
            args["v"] = normal(*shape[:-1], dim_v, dtype=self.dtype, **how)
            if isinstance(self.new, tuple):
                args["cu_seqlens_k_new"] = cumulative(self.new, device)
        if self.seqlens == "int":
            args["cache_seqlens"] = self.lens[0]
        elif self.seqlens == "tensor":
            args["cache_seqlens"] = torch.tensor(self.lens, dtype=torch.int32, device=device)
        if self.batch_idx:
            known = len(args[self.table_name]) if self.page_size else rows
            index = torch.randperm(known, generator=gen)[:batch]
            args["cache_batch_idx"] = index.to(device, torch.int32)
        if self.leftpad is not None:
            args["cache_leftpad"] = torch.tensor(self.leftpad, dtype=torch.int32, device=device)
        if self.rotary:
            angles = torch.rand(longest + page_size, self.rotary, generator=gen) * 7
            args["rotary_cos"] = angles.cos().to(device, self.dtype)
            args["rotary_sin"] = angles.sin().to(device, self.dtype)
            args["rotary_interleaved"] = self.interleaved
            if self.rotary_seqlens:
                start = torch.randint(0, longest, (batch,), generator=gen)
                args["rotary_seqlens"] = start.to(device, torch.int32)
        if self.alibi:
            shape_alibi = (heads,) if self.alibi == 1 else (batch, heads)
            slopes = 2.0 ** -torch.randint(1, 8, shape_alibi, generator=gen)
            args["alibi_slopes"] = slopes.to(device)
        if self.sinks:
            args[self.sinks] = normal(heads, dtype=torch.float32, **how)
        if self.descale:
            shapes = {"[Hkv]": (kv_heads,), "[B, Hkv]": (batch, kv_heads)}
            for name in ("q_descale", "k_descale", "v_descale"):
                scale = torch.rand(shapes.get(self.descale, ()), generator=gen) + 0.5
                args[name] = float(scale) if self.descale == "float" else scale.to(device)
        for name, value in (
            ("causal", self.causal),
            ("window_size", self.window_size),
            ("softcap", self.softcap),
            ("softmax_scale", self.softmax_scale),
            ("attention_chunk", self.chunk),
            ("num_splits", self.num_splits),
            ("return_softmax_lse", self.lse),
        ):
            args[name] = value
        self._poison(args)
        return args

    def _shape(self, lens: int | tuple[int, ...], heads: int, dim: int) -> tuple[int, ...]:
        if isinstance(lens, tuple):
            return sum(lens) + self.padding_rows, heads, dim
        return len(self.lens), lens, heads, dim

    def places(self, args: dict[str, Any], b: int, pos: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Where tokens ``pos`` of sequence b lie on the first two axes of the caches."""
        index = int(args["cache_batch_idx"][b]) if self.batch_idx else b
        size = args["k_cache"].shape[1]
        row = args[self.table_name][index].tolist() if self.page_size else [index]
        device = args["q"].device
        return (
            torch.tensor([row[p // size] for p in pos], dtype=torch.long, device=device),
            torch.tensor([p % size for p in pos], dtype=torch.long, device=device),
        )

    def spans(self, args: dict[str, Any]) -> Iterator[tuple[int, int, int, int]]:
        """(sequence, first token seen, tokens before, tokens after the append)."""
        for b, new in enumerate(self.counts(self.new)):
            size = args["k_cache"].shape[1]
            full = size * (args[self.table_name].shape[1] if self.page_size else 1)
            before = full if self.seqlens == "none" else self.lens[b]
            after = before if before < 0 else before + new
            yield b, 0 if self.leftpad is None else self.leftpad[b], before, after

    def _poison(self, args: dict[str, Any]) -> None:
        """What no sequence has in the cache before the call is NaN."""
        for name in ("k_cache", "v_cache"):
            cache = args[name]
            owned = torch.zeros(cache.shape[:2], dtype=torch.bool, device=cache.device)
            for b, first, before, _ in self.spans(args):
                owned[self.places(args, b, range(first, max(before, first)))] = True
            raw = cache.view(torch.uint8) if cache.dtype in FP8_NAN_INF else cache
            nan = FP8_NAN_INF[cache.dtype][0] if cache.dtype in FP8_NAN_INF else math.nan
            raw[~owned] = nan

    def check(self, device: torch.device) -> None:
        args = self.build(device)
        note = f"{self!r}.check(device)"
        expected = twins(args["k_cache"], args["v_cache"])
        result = flash_attn_with_kvcache(**args)
        self._check_append(args, expected)
        if isinstance(self.q_lens, int):
            out, lse = result if self.lse else (result, None)
            batch, heads, dim_v = len(self.lens), self.heads[0], self.head_dims[1]
            assert out.shape == (batch, self.q_lens, heads, dim_v), note
            packed = out.flatten(0, 1)
            if lse is not None:
                assert lse.shape == (batch, heads, self.q_lens), note
                packed = packed, lse.transpose(0, 1).flatten(1)
            result = packed
        factor = 4.0 if self.cache_dtype not in (None, self.dtype) else 2.0 + (self.softcap > 0)
        fair = self._attention(args, self.dtype)
        compare(result, args["q"], self._attention(args, F64), fair, factor, note)

    def _turn(self, args: dict[str, Any], x: Tensor, b: int, t: int, is_q: bool) -> Tensor:
        if not self.rotary:
            return x
        start = int(args["rotary_seqlens"][b]) if self.rotary_seqlens else self.lens[b]
        if is_q and not self.causal and self.window_size == (-1, -1):
            t = 0
        return rotated(x, args["rotary_cos"], args["rotary_sin"], start + t, self.interleaved)

    def _check_append(self, args: dict[str, Any], expected: list[Tensor]) -> None:
        """Bit for bit, in all memory around the caches."""
        if self.new is not None:
            edges = [0, *itertools.accumulate(self.counts(self.new))]
            k, v = (args[n].reshape(-1, *args[n].shape[-2:]) for n in ("k", "v"))
            for b, _, before, after in self.spans(args):
                if before < 0 or before == after:
                    continue
                place = tuple(i.cpu() for i in self.places(args, b, range(before, after)))
                new = range(edges[b], edges[b] + after - before)
                keys = [self._turn(args, k[i], b, t, False) for t, i in enumerate(new)]
                rows = torch.stack(keys), v[new.start : new.stop]
                for cache, x, name in zip(expected, rows, ("k_descale", "v_descale"), strict=True):
                    raw(cache)[place] = raw(
                        reference.quantise(x, cache.dtype, args.get(name)).cpu()
                    )
        assert_same_memory((args["k_cache"], args["v_cache"]), expected)

    def _attention(self, args: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Over what the caches hold after the call."""
        q = args["q"].reshape(-1, *args["q"].shape[-2:])
        q_lens, group = self.counts(self.q_lens), self.heads[0] // self.heads[1]
        none = torch.zeros(0, dtype=torch.long, device=q.device)
        rows, k_lens = [], []
        keys, values = ([raw(args[n])[none, none]] for n in ("k_cache", "v_cache"))
        edges = [0, *itertools.accumulate(q_lens)]
        for b, first, _, after in self.spans(args):
            for t, row in enumerate(q[edges[b] : edges[b + 1]]):
                row = self._turn(args, row, b, t, True).to(dtype)
                if self.descale:
                    scale = torch.as_tensor(args["q_descale"], dtype=F64, device=q.device)
                    scale = scale[b] if scale.dim() == 2 else scale
                    factor = scale.expand(self.heads[1]).repeat_interleave(group)
                    row = (row.to(F64) * factor[:, None]).to(dtype)
                rows.append(row)
            place = self.places(args, b, range(first, max(after, first)))
            k_lens.append(len(place[0]))
            for into, name in ((keys, "k_cache"), (values, "v_cache")):
                into.append(raw(args[name])[place])
        padding = q[edges[-1] :].to(dtype)
        cache_dtype = args["k_cache"].dtype
        return reference.varlen_attention(
            torch.cat([torch.stack(rows), padding]) if rows else padding,
            torch.cat(keys).view(cache_dtype),
            torch.cat(values).view(cache_dtype),
            cumulative(q_lens, q.device),
            cumulative(k_lens, q.device),
            softmax_scale=self.softmax_scale,
            causal=self.causal,
            window_size=self.window_size,
            chunk_size=self.chunk or None,
            softcap=self.softcap,
            alibi_slopes=args.get("alibi_slopes"),
            sinks=args.get(self.sinks) if self.sinks else None,
            k_scale=args.get("k_descale"),
            v_scale=args.get("v_descale"),
            return_lse=True,
            compute_dtype=dtype,
        )


def raw(x: Tensor) -> Tensor:
    """Float8 as bytes, which torch can index."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
