"""Whole attention calls as plain values, for tests, fuzzing and benchmarks."""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from .inputs import (
    Device,
    block_table,
    cumulative,
    generator,
    kv_pool,
    normal,
    packed_keys,
    packed_rows,
    poison,
    probe,
)


@dataclass(frozen=True)
class Case:
    """One call, as plain values: ``build`` makes the tensors, ``repr`` can be pasted.

    ``k_lens`` are the lengths of the keys of ``varlen_attention``, the cached ones of the other
    two.  ``q_lens=None`` is one query a sequence, ``paged_attention`` without ``cu_seqlens_q``.
    ``options`` go to the call as they are; options that are tensors have fields of their own.
    """

    function: str
    k_lens: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    heads: tuple[int, int] = (4, 2)  # Hq, Hkv
    head_dims: tuple[int, int] = (64, 64)  # D, Dv
    dtype: torch.dtype = torch.float16
    cache_dtype: torch.dtype | None = None  # None: dtype
    page_size: int = 16
    padding_rows: int = 0  # rows of q past cu_seqlens_q[-1]
    layout: str = "contiguous"  # of q, k and v: PACKED_LAYOUTS
    pool_layout: str = "token_major"  # POOL_LAYOUTS or "latent"
    table: str = "int32"  # or "int64", or "flat": with block_indptr
    max_seqlens: bool = False  # whether max_seqlen_q and max_seqlen_k are given
    alibi: int = 0  # 1: [Hq], 2: [B, Hq]
    sinks: bool = False
    option_dtype: torch.dtype = torch.float32  # of alibi_slopes and sinks
    query_scale: bool = False
    tree_mask: bool = False
    kv_scale: str = ""  # SCALE_SHAPES, of k_scale and v_scale
    out: str = ""  # "contiguous", "sliced", or a dtype's name; "": none is passed
    options: dict[str, Any] = field(default_factory=dict)
    poison: str = ""  # "nan" or "inf"
    probe: bool = False
    seed: int = 0

    def __repr__(self) -> str:
        given = [
            f
            for f in fields(self)[1:]
            if f.name == "k_lens" or getattr(self, f.name) != _default(f)
        ]
        text = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in given)
        return f"Case({self.function!r}, {text})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis prints it: without the fields that have their defaults."""
        printer.text(repr(self))

    def build(self, device: Device = "cpu") -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's positional arguments and its options."""
        gen = generator(self.seed)
        how: dict[str, Any] = {"generator": gen, "device": device}
        batch, (heads, kv_heads), (dim, dim_v) = len(self.k_lens), self.heads, self.head_dims
        q_lens = (1,) * batch if self.q_lens is None else self.q_lens
        total_q = sum(q_lens) + self.padding_rows
        q = packed_rows(total_q, heads, dim, self.layout, dtype=self.dtype, **how)
        cu_seqlens_q = cumulative(q_lens, device)
        lens = torch.tensor(self.k_lens, dtype=torch.int32, device=device)
        options = dict(self.options)

        total_k = sum(self.k_lens) if self.function == "varlen_attention" else total_q
        new: tuple[Tensor, ...] = ()
        if self.function != "paged_attention":
            sizes = (total_k, kv_heads, dim, dim_v)
            new = packed_keys(*sizes, self.layout, dtype=self.dtype, **how)
        cache: tuple[Tensor, ...] = ()
        if self.function != "varlen_attention":
            dtype = torch.int64 if self.table == "int64" else torch.int32
            table, num_pages = block_table(self.k_lens, self.page_size, dtype=dtype, **how)
            pool = (num_pages, self.page_size, kv_heads, dim, dim_v, self.pool_layout)
            pages = kv_pool(*pool, dtype=self.cache_dtype or self.dtype, **how)
            if self.table == "flat":
                counts = [-(-max(0, n) // self.page_size) + 1 for n in self.k_lens]
                options["block_indptr"] = cumulative(counts, device)
                table = torch.cat([row[:n] for row, n in zip(table, counts, strict=True)] or [lens])
            cache = (*pages, table)
        args = {
            "varlen_attention": (q, *new, cu_seqlens_q, cumulative(self.k_lens, device)),
            "prefix_attention": (q, *new, *cache, cu_seqlens_q, lens),
            "paged_attention": (q, *cache, lens),
        }[self.function]
        if self.function == "paged_attention" and self.q_lens is not None:
            options["cu_seqlens_q"] = cu_seqlens_q
        if self.max_seqlens:
            is_prefix = self.function == "prefix_attention"
            k_lens = [max(0, k) + q * is_prefix for k, q in zip(self.k_lens, q_lens, strict=True)]
            options["max_seqlen_q"] = max(q_lens, default=0)
            options["max_seqlen_k"] = max(k_lens, default=0)
        options |= self._tensor_options(batch, total_q, max(q_lens, default=0), how)
        if self.probe:
            probe(self.function, args, options)
        if self.poison:
            poison(self.function, args, options, float(self.poison))
        return args, options

    def _tensor_options(
        self, batch: int, total_q: int, max_q: int, how: dict[str, Any]
    ) -> dict[str, Any]:
        (heads, kv_heads), gen, device = self.heads, how["generator"], how["device"]
        options: dict[str, Any] = {}
        if self.alibi:
            shape = (heads,) if self.alibi == 1 else (batch, heads)
            slopes = 2.0 ** -torch.randint(1, 8, shape, generator=gen)
            options["alibi_slopes"] = slopes.to(device, self.option_dtype)
        if self.sinks:
            options["sinks"] = normal(heads, dtype=self.option_dtype, **how)
        if self.query_scale:
            scale = torch.rand(total_q, generator=gen) + 0.5
            options["query_scale"] = scale.to(device)
        if self.tree_mask:
            tree = torch.rand(total_q, max_q + 1, generator=gen) < 0.6
            options["tree_mask"] = tree.to(device)
        if self.kv_scale:
            shapes = {"[1]": (1,), "[Hkv]": (kv_heads,), "[B, Hkv]": (batch, kv_heads)}
            for name in ("k_scale", "v_scale"):
                scale = torch.rand(shapes.get(self.kv_scale, ()), generator=gen) + 0.5
                options[name] = float(scale) if self.kv_scale == "float" else scale.to(device)
        if self.out:
            layout = "sliced" if self.out == "sliced" else "contiguous"
            dtype = getattr(torch, self.out, self.dtype)
            sizes = (total_q, heads, self.head_dims[1])
            options["out"] = packed_rows(*sizes, layout, dtype=dtype, **how)
        return options


def _default(f: Field[Any]) -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default
