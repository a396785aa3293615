"""Llama 4's attention layers on tritonattn, each against a plain torch version of the same layer.

    pip install -e ".[triton]"
    python examples/llama4_attention.py

The layer is ``llama4_layer.py``; the plain version here knows no pages, no stages and no ranks: it
computes each whole sequence at once, with a mask, in float64 to measure by, and in the layer's own
dtype to say how much error is fair.  A line for each thing shown; a result outside the error budget
of ``tritonattn.testing`` ends in FAILED and an exit status of 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from llama4_layer import Batch, Config, Llama4Attention
from torch.utils._python_dispatch import TorchDispatchMode

from tritonattn.testing import assert_close, block_table, cumulative, generator, normal

PAGE_SIZE = 4
# New tokens of each sequence, step by step.
SCHEDULE = (("prefill", (9, 3)), ("chunk", (8, 5)), ("mixed", (1, 6)), ("decode", (1, 1)))
SHORT = (("prefill", (9,)), ("mixed", (8,)))
TEMPERATURE = {"floor_scale": 4.0, "attn_scale": 0.9}  # so that short sequences feel it


def make_weights(config: Config, dtype: torch.dtype, device) -> dict[str, torch.Tensor]:
    """Large enough that attention is no mere average."""
    size, dim, gen = config.hidden_size, config.head_dim, generator(0)
    heads, kv_heads = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes = {"q": (heads, size), "k": (kv_heads, size), "v": (kv_heads, size), "o": (size, heads)}
    return {
        name: (normal(*shape, dtype=torch.float32, generator=gen) * 0.2).to(device, dtype)
        for name, shape in shapes.items()
    }


def plain(
    config: Config,
    use_rope: bool,
    weights: Mapping[str, torch.Tensor],
    hidden: torch.Tensor,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The layer for all tokens of one sequence, ``[length, hidden_size]``, in ``dtype``."""
    wide = torch.promote_types(dtype, torch.float32)
    x, w = hidden.to(dtype), {name: weight.to(dtype) for name, weight in weights.items()}
    q, k, v = ((x @ w[name].T).unflatten(-1, (-1, config.head_dim)) for name in "qkv")
    pos = torch.arange(len(x), device=x.device)
    seen = pos[None, :] <= pos[:, None]
    if use_rope:
        chunk = pos // config.attention_chunk_size
        seen &= chunk[None, :] == chunk[:, None]
        q, k = (turn_as_complex(y.to(wide), pos, config).to(dtype) for y in (q, k))
        if config.use_qk_norm:
            q, k = (
                F.rms_norm(y.to(wide), y.shape[-1:], eps=config.rms_norm_eps).to(dtype)
                for y in (q, k)
            )
    elif config.attn_temperature_tuning:  # as Llama 4 itself has it: on the queries
        steps = ((pos + 1) / config.floor_scale).floor().to(wide)
        q = (q * (1 + config.attn_scale * torch.log1p(steps))[:, None, None]).to(dtype)
    group = config.num_attention_heads // config.num_key_value_heads
    k, v = (y.repeat_interleave(group, dim=1) for y in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k).to(wide) * config.head_dim**-0.5
    weight = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(dtype)
    return torch.einsum("hij,jhd->ihd", weight, v).flatten(1) @ w["o"].T


def turn_as_complex(x: torch.Tensor, pos: torch.Tensor, config: Config) -> torch.Tensor:
    """Rotary embedding as Llama's authors wrote it: pairs of dims are complex numbers, turned."""
    dim = config.head_dim
    angle = pos[:, None].to(x.dtype) * config.rope_theta ** (
        -torch.arange(0, dim, 2, dtype=x.dtype, device=x.device) / dim
    )
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    pairs = (-1, 2) if config.rope_interleaved else (2, -1)
    x = x.unflatten(-1, pairs)
    x = x if config.rope_interleaved else x.transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(x.contiguous()) * turn)
    return (turned if config.rope_interleaved else turned.transpose(-1, -2)).flatten(-2)


def batches(schedule: Sequence[tuple[str, tuple[int, ...]]], device) -> tuple[list[Batch], int]:
    """The schedule's steps, and the pages that they need."""
    totals = tuple(sum(new) for new in zip(*(n for _, n in schedule), strict=True))
    tables, num_pages = block_table(totals, PAGE_SIZE, generator=generator(1), device=device)
    steps, lens = [], [0] * len(totals)
    for stage, new in schedule:
        spans = [
            torch.arange(n, n + more, device=device) for n, more in zip(lens, new, strict=True)
        ]
        slots = [
            tables[b, span // PAGE_SIZE].long() * PAGE_SIZE + span % PAGE_SIZE
            for b, span in enumerate(spans)
        ]
        context = torch.tensor(lens, dtype=torch.int32, device=device)
        lens = [n + more for n, more in zip(lens, new, strict=True)]
        steps.append(Batch(
            stage, torch.cat(spans).int(), torch.cat(slots), tables, cumulative(new, device),
            context, torch.tensor(lens, dtype=torch.int32, device=device),
        ))  # fmt: skip
    return steps, num_pages


class NoHostReads(TorchDispatchMode):
    """Refuses what reads a tensor's values on the host; on a GPU torch itself refuses to wait."""

    READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in self.READS, f"{func} reads values on the host"
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("error")
        return super().__enter__()

    def __exit__(self, *error):
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
        return super().__exit__(*error)


def serve(
    ranks: Sequence[Llama4Attention], hidden: Sequence[torch.Tensor], schedule=SCHEDULE
) -> torch.Tensor:
    """All ranks' layer over the schedule, step by step through their caches: every row's result."""
    steps, num_pages = batches(schedule, hidden[0].device)
    caches = [rank.new_cache(num_pages, PAGE_SIZE) for rank in ranks]
    ends = [accumulate(new) for new in zip(*(n for _, n in schedule), strict=True)]
    ends = list(zip(*ends, strict=True))
    results: list[list[torch.Tensor]] = [[] for _ in hidden]
    for (_, new), batch, end in zip(schedule, steps, ends, strict=True):
        rows = torch.cat([h[e - n : e] for h, e, n in zip(hidden, end, new, strict=True)])
        with NoHostReads():
            parts = [r.forward(rows, batch, *c) for r, c in zip(ranks, caches, strict=True)]
            whole = torch.stack(parts).sum(0)  # what an all-reduce does
        for result, part in zip(results, whole.split(new), strict=True):
            result.append(part)
    return torch.cat([x for result in results for x in result])


def compare(
    config: Config, use_rope: bool, weights: Mapping[str, torch.Tensor],
    hidden: Sequence[torch.Tensor], out: torch.Tensor,
) -> str:  # fmt: skip
    oracle, fair = (
        torch.cat([plain(config, use_rope, weights, h, dtype) for h in hidden])
        for dtype in (torch.float64, out.dtype)
    )
    assert_close(out, oracle, fair, dtype=out.dtype)
    ours, plains = ((x.double() - oracle).abs().max().item() for x in (out, fair))
    return f"off by {ours:.1e}, plain torch by {plains:.1e}"


def check(
    config: Config, use_rope: bool, device, *, dtype: torch.dtype = torch.float32, world: int = 1,
    schedule=SCHEDULE,
) -> str:  # fmt: skip
    weights = make_weights(config, dtype, device)
    how = {"dtype": dtype, "generator": generator(2), "device": device}
    lengths = [sum(new) for new in zip(*(n for _, n in schedule), strict=True)]
    hidden = [normal(n, config.hidden_size, **how) for n in lengths]
    ranks = [Llama4Attention(config, use_rope, weights, rank, world) for rank in range(world)]
    return compare(config, use_rope, weights, hidden, serve(ranks, hidden, schedule))


# What is shown: each a function of the device that yields lines.


def show_rope_layers(device) -> Iterator[str]:
    yield "two sequences through prefill, a chunk each, a mixed step and a decode, pages of 4:"
    for interleaved, norm in ((True, True), (False, False)):
        config = Config(rope_interleaved=interleaved, use_qk_norm=norm)
        kind = "interleaved" if interleaved else "neox"
        said = check(config, True, device)
        yield f"RoPE layer, {kind}, {'with' if norm else 'without'} QK norm, chunks of 7: {said}"


def show_chunk_sizes(device) -> Iterator[str]:
    for size in (1, 5, 8, 8192):
        said = check(Config(attention_chunk_size=size), True, device, schedule=SHORT)
        yield f"RoPE layer, chunks of {size}: {said}"


def show_nope_layers(device) -> Iterator[str]:
    said = check(replace(Config(), **TEMPERATURE), False, device)
    yield f"NoPE layer, full attention at a temperature: {said}"
    said = check(Config(attn_temperature_tuning=False), False, device, schedule=SHORT)
    yield f"NoPE layer without temperature: {said}"


def show_bfloat16(device) -> Iterator[str]:
    how = {"dtype": torch.bfloat16, "schedule": SHORT}
    yield f"RoPE layer in bfloat16: {check(Config(), True, device, **how)}"
    said = check(replace(Config(), **TEMPERATURE), False, device, **how)
    yield f"NoPE layer in bfloat16, temperature in float32 (plain torch rounds q once more): {said}"


def show_ranks(device) -> Iterator[str]:
    config = Config(num_attention_heads=12)
    for world, use_rope in ((2, True), (4, False), (6, True)):
        how = {"world": world, "schedule": SHORT}
        said = check(replace(config, **TEMPERATURE), use_rope, device, **how)
        copies = f", each KV head on {world // 2} ranks" if world > 2 else ""
        kind = "RoPE" if use_rope else "NoPE"
        yield f"12 heads on 2 over {world} ranks, {12 // world} on 1 each{copies}, {kind}: {said}"


def show_graph(device) -> Iterator[str]:
    config = Config(attention_chunk_size=6)
    weights = make_weights(config, torch.float32, device)
    layer = Llama4Attention(config, True, weights)
    how = {"dtype": torch.float32, "generator": generator(3), "device": device}
    new = ((9, 3), (1, 1)), ((5, 12), (1, 1))  # the lengths when captured, and when replayed
    (_, first), num_pages = batches([*zip(("prefill", "decode"), new[0], strict=True)], device)
    prefill, other = batches([*zip(("prefill", "decode"), new[1], strict=True)], device)[0]
    k_cache, v_cache = layer.new_cache(num_pages + 2, PAGE_SIZE)
    rows = normal(2, config.hidden_size, **how)
    table = F.pad(first.block_table, (0, 2))
    first = replace(first, block_table=table)
    replay, kind = lambda: layer.forward(rows, first, k_cache, v_cache), "the same buffers again"
    replay()
    if torch.device(device).type == "cuda":
        graph, kind = torch.cuda.CUDAGraph(), "a CUDA graph replayed"
        with torch.cuda.graph(graph):
            out = replay()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

    hidden = [normal(n + 1, config.hidden_size, **how) for n in new[1][0]]
    layer.forward(torch.cat([h[:-1] for h in hidden]), prefill, k_cache, v_cache)
    rows.copy_(torch.stack([h[-1] for h in hidden]))
    table.fill_(-1)[:, : other.block_table.shape[1]] = other.block_table
    for name in ("positions", "slot_mapping", "context_lens", "seq_lens"):
        getattr(first, name).copy_(getattr(other, name))
    replayed = replay()
    oracle, fair = (
        torch.stack([plain(config, True, weights, h, dtype)[-1] for h in hidden])
        for dtype in (torch.float64, torch.float32)
    )
    assert_close(replayed, oracle, fair, dtype=torch.float32)
    error = (replayed.double() - oracle).abs().max().item()
    yield f"{kind} with other lengths, in other chunks of 6: off by {error:.1e}"
    guard = "torch.cuda's sync debug mode" if torch.cuda.is_available() else "a dispatch mode"
    yield f"no call above read a length, a position or a mask on the host ({guard} watched)"


SHOWS: tuple[Callable[..., Iterator[str]], ...] = (
    show_rope_layers, show_chunk_sizes, show_nope_layers, show_bfloat16, show_ranks, show_graph,
)  # fmt: skip


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Llama 4's attention layers on tritonattn, shown.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args(argv).device
    failed = 0
    for show in SHOWS:
        try:
            for line in show(device):
                print(line, flush=True)
        except AssertionError as error:
            failed += 1
            print(f"FAILED {show.__name__}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
