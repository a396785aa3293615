"""Steps of serving for the layer of ``early_layer.py``, and what it should make of them.

A step is held twice: as the layer takes it, and densely, without pages, metadata or a cache.  What
no token may see, such as unused slots, is full of NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from early_layer import FP8, Attention, AttentionMetadata, PagedAttention

from tritonattn import reference
from tritonattn.testing import assert_close, block_table, cumulative, generator, normal

BLOCK_SIZE = 4


@dataclass
class Step:
    """The tokens of one forward pass, as the layer takes them and densely."""

    query: torch.Tensor  # [num_tokens, Hq * D]
    key: torch.Tensor  # [num_tokens, Hkv * D]
    value: torch.Tensor
    kv_cache: torch.Tensor  # [2, num_blocks, block_size * Hkv * D], the contexts written
    metadata: AttentionMetadata
    kv_scale: float
    dense: list[list[torch.Tensor]]  # the keys and the values of each sequence, [len, Hkv, D]

    def run(self, layer: Attention, kv_cache: torch.Tensor | None) -> torch.Tensor:
        tensors = (self.query, self.key, self.value)
        return layer.forward(*tensors, kv_cache, self.metadata, self.kv_scale)


def make_step(
    layer: Attention,
    prompts: list[tuple[int, int]],
    decodes: list[int],
    *,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    kv_scale: float = 1.0,
) -> Step:
    """``prompts`` are (tokens in the cache, new ones), ``decodes`` tokens in the cache."""
    contexts = [context for context, _ in prompts] + decodes
    new = [n for _, n in prompts] + [1] * len(decodes)
    lens = [context + n for context, n in zip(contexts, new, strict=True)]
    how = {"generator": generator(0), "device": device}
    heads, dim = layer.num_kv_heads, layer.head_size
    tables, num_blocks = block_table(tuple(lens), BLOCK_SIZE, **how)
    stored = dtype if layer.kv_cache_dtype == "auto" else torch.uint8
    shape = PagedAttention.get_kv_cache_shape(num_blocks, BLOCK_SIZE, heads, dim)
    nan = 0x7F if stored == torch.uint8 else torch.nan
    kv_cache = torch.full(shape, nan, dtype=stored, device=device)
    halves = PagedAttention.split_kv_cache(kv_cache, heads, dim)

    dense = [[normal(n, heads, dim, dtype=dtype, **how) for n in lens] for _ in range(2)]
    slots = [
        tables[b, t // BLOCK_SIZE].long() * BLOCK_SIZE + t % BLOCK_SIZE
        for b, t in enumerate(torch.arange(n, device=device) for n in lens)
    ]
    for b, context in enumerate(contexts):
        rows = (x[b][:context] for x in dense)
        how_stored = (slots[b][:context], layer.kv_cache_dtype, kv_scale)
        PagedAttention.write_to_paged_cache(*rows, *halves, *how_stored)
    tokens = sum(new)
    rows = (torch.cat([x[-n:] for x, n in zip(xs, new, strict=True)]) for xs in (*dense, slots))
    key, value, slot_mapping = rows
    key, value = (F.pad(x.flatten(1), (0, 0, 0, padding)) for x in (key, value))
    num_prompts, num_prompt_tokens = len(prompts), sum(n for _, n in prompts)
    metadata = AttentionMetadata(
        num_prefills=num_prompts,
        num_prefill_tokens=num_prompt_tokens,
        num_decode_tokens=len(decodes),
        slot_mapping=F.pad(slot_mapping, (0, padding), value=-1),
        seq_lens=lens,
        seq_lens_tensor=torch.tensor(lens, dtype=torch.int32, device=device),
        max_query_len=max((n for _, n in prompts), default=0),
        max_seq_len=max(lens),
        subquery_start_loc=cumulative(new, device),
        seq_start_loc=cumulative(lens[:num_prompts], device),
        context_lens_tensor=torch.tensor(contexts, dtype=torch.int32, device=device)
        if any(contexts[:num_prompts])
        else None,
        block_tables=tables,
    )
    query = normal(tokens + padding, layer.num_heads * dim, dtype=dtype, **how)
    return Step(query, key, value, kv_cache, metadata, kv_scale, dense)


def plain(layer: Attention, step: Step, compute_dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Attention over the dense tokens, those that come from a float8 cache rounded as it does."""
    m = step.metadata
    new = m.subquery_start_loc.diff().tolist()

    def attended(tokens: list[torch.Tensor]) -> torch.Tensor:
        """A prompt's own tokens as they are, unless all goes through the cache."""
        rows = []
        for b, x in enumerate(tokens):
            own = new[b] if b < m.num_prefills and not layer.one_call else 0
            cached = x[: len(x) - own]
            rows += [as_cached(layer, cached, step.kv_scale), x[len(cached) :].double()]
        return torch.cat(rows)

    keys, values = map(attended, step.dense)
    lens = cumulative([len(x) for x in step.dense[0]], keys.device)
    query = step.query.view(-1, layer.num_heads, layer.head_size)
    tensors = (query, keys, values, m.subquery_start_loc, lens)
    out = reference.varlen_attention(*tensors, compute_dtype=compute_dtype, **layer.options)
    return out.flatten(1)


def as_cached(layer: Attention, x: torch.Tensor, scale: float) -> torch.Tensor:
    if layer.kv_cache_dtype == "auto":
        return x.double()
    return reference.quantise(x, FP8[layer.kv_cache_dtype], scale).double() * scale


def compare(layer: Attention, step: Step, out: torch.Tensor) -> str:
    """How far ``out`` is from float64; an AssertionError where that is too far."""
    oracle, fair = plain(layer, step), plain(layer, step, step.query.dtype)
    factor = 2.0 if layer.kv_cache_dtype == "auto" else 4.0
    if layer.options.get("softcap"):
        factor = max(factor, 3.0)
    assert_close(out, oracle, fair, dtype=step.query.dtype, factor=factor)
    return f"off by {(out.double() - oracle).abs().max().item():.1e}"


def check(layer: Attention, step: Step) -> str:
    """Run the step and compare; the metadata must come out of it as it went in."""
    before = [getattr(step.metadata, f.name) for f in fields(step.metadata)]
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in before]
    said = compare(layer, step, step.run(layer, step.kv_cache))
    for f, old in zip(fields(step.metadata), before, strict=True):
        now = getattr(step.metadata, f.name)
        same = torch.equal(now, old) if isinstance(old, torch.Tensor) else now == old
        assert same, f"the layer changed {f.name} of the metadata"
    assert len(vars(step.metadata)) == len(before), "the layer kept something on the metadata"
    return said
