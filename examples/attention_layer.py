"""All that the attention layer of ``early_layer.py`` can do, each against attention in plain torch.

    pip install -e ".[triton]"
    python examples/attention_layer.py

Every line names what was run and how far it was from float64 attention over the same tokens, which
``early_steps.py`` keeps densely, without pages or metadata.  A result outside the error budget of
``tritonattn.testing`` ends in FAILED and an exit status of 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from early_layer import Attention, PagedAttention
from early_steps import BLOCK_SIZE, check, compare, make_step, plain

from tritonattn import alibi_slopes
from tritonattn.testing import generator, normal, same_bytes

SLOPES = alibi_slopes(4).tolist()


# What is shown: each a function of the device that yields lines.


def show_prompts(device) -> Iterator[str]:
    options = {
        "causal": {},
        "sliding window of 6": {"sliding_window": 6},
        "ALiBi": {"alibi_slopes": SLOPES},
        "ALiBi and window at once": {"alibi_slopes": SLOPES, "sliding_window": 6},
    }
    for name, how in options.items():
        layer = Attention(4, 32, 32**-0.5, 2, device=device, **how)
        step = make_step(layer, [(0, 5), (0, 17), (0, 3)], [], device=device)
        yield f"three prompts in one call, 4 heads on 2, {name}: {check(layer, step)}"
        without_cache = compare(layer, step, step.run(layer, None))
    yield f"the same without a cache, as a profiling run has it: {without_cache}"


def show_long_alibi(device) -> Iterator[str]:
    layer = Attention(2, 16, 0.25, alibi_slopes=[1.0, 0.5], device=device)
    step = make_step(layer, [(0, 300)], [], dtype=torch.bfloat16, device=device)
    yield f"ALiBi past position 257 in bfloat16, positions in float32: {check(layer, step)}"

    q, k, v = (x.view(300, 2, 16).transpose(0, 1) for x in (step.query, step.key, step.value))
    position = torch.arange(300, dtype=torch.bfloat16, device=device)
    bias = (position[None, :] - position[:, None]) * q.new_tensor([1.0, 0.5])[:, None, None]
    bias.masked_fill_(bias.new_ones(300, 300).triu(1).bool(), -torch.inf)
    old = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.25)
    error = (old.transpose(0, 1).flatten(1) - plain(layer, step)).abs().max().item()
    yield f"  (a bias made in bfloat16, as it was, is off by {error:.1e}: 257 is 256 there)"


def show_prefixes(device) -> Iterator[str]:
    options = {
        "alone": {},
        "sliding window of 9": {"sliding_window": 9},
        "ALiBi, window": {"alibi_slopes": SLOPES, "sliding_window": 9},
        "float8 cache, scale 0.4": {"kv_cache_dtype": "fp8"},
        "ALiBi, window, float8, softcap, sinks": {
            "alibi_slopes": SLOPES, "sliding_window": 9, "kv_cache_dtype": "fp8_e5m2",
            "softcap": 3.0, "sinks": torch.arange(4.0, device=device),
        },
    }  # fmt: skip
    for name, how in options.items():
        layer = Attention(4, 72, 0.3, 2, device=device, **how)
        kv_scale = 0.4 if "kv_cache_dtype" in how else 1.0
        step = make_step(layer, [(13, 6), (0, 4), (22, 1)], [], device=device, kv_scale=kv_scale)
        said = check(layer, step)
        yield f"prompts after a cached prefix, head size 72, scale 0.3, {name}: {said}"


def show_decodes(device) -> Iterator[str]:
    options = {
        "ALiBi": {"alibi_slopes": SLOPES},
        "float8 e4m3 cache, scale 0.4": {"kv_cache_dtype": "fp8_e4m3"},
        "float8 e5m2 cache, scale 0.4": {"kv_cache_dtype": "fp8_e5m2"},
    }
    for name, how in options.items():
        layer = Attention(4, 32, 32**-0.5, 2, device=device, **how)
        kv_scale = 0.4 if "kv_cache_dtype" in how else 1.0
        step = make_step(layer, [], [12, 0, 29], device=device, kv_scale=kv_scale)
        yield f"decodes, {name}: {check(layer, step)}"
    layer = Attention(4, 32, 32**-0.5, 2, sliding_window=6, device=device)
    step = make_step(layer, [], [22, 3, 29], device=device)
    for table, length in zip(step.metadata.block_tables, step.metadata.seq_lens, strict=True):
        table[: max(0, length - 6) // BLOCK_SIZE] = -1  # freed: no block table is trimmed for us
    yield f"decodes, window of 6, blocks before it freed and their ids gone: {check(layer, step)}"


def show_mixed(device) -> Iterator[str]:
    how = {"alibi_slopes": SLOPES, "sliding_window": 9, "kv_cache_dtype": "fp8"}
    for options, kv_scale, name in ((how, 0.4, "ALiBi, window, float8"), ({}, 1.0, "no options")):
        for one_call in (False, True):
            layer = Attention(4, 32, 0.2, 2, one_call=one_call, device=device, **options)
            prompts, decodes = [(0, 7), (9, 5)], [12, 30]
            step = make_step(layer, prompts, decodes, padding=3, device=device, kv_scale=kv_scale)
            calls = "one call" if one_call else "a call each"
            yield f"prompts, decodes and 3 tokens of padding, {calls}, {name}: {check(layer, step)}"
    written = 2 * sum(step.metadata.seq_lens) * layer.num_kv_heads * layer.head_size
    assert step.kv_cache.isfinite().sum() == written
    yield "  (padding came out as 0, and its slots of -1 left every other slot as it was)"
    yield "  (each step's metadata, here and above, came out as it went in: nothing is kept on it)"


def show_graph(device) -> Iterator[str]:
    layer = Attention(4, 32, 0.2, 2, sliding_window=9, device=device)
    step = make_step(layer, [], [12, 30, 5, 1], device=device)
    step.metadata = replace(step.metadata, use_cuda_graph=True)
    compare(layer, step, step.run(layer, step.kv_cache))  # compiles, outside of the capture
    replay, how = lambda: step.run(layer, step.kv_cache), "the same buffers again"
    if torch.device(device).type == "cuda":
        graph, how = torch.cuda.CUDAGraph(), "a CUDA graph replayed"
        with torch.cuda.graph(graph):
            out = replay()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

    other = make_step(layer, [], [8, 21], device=device)
    m, n = step.metadata, other.metadata
    m.seq_lens_tensor.zero_()[:2] = n.seq_lens_tensor
    m.slot_mapping.fill_(-1)[:2] = n.slot_mapping
    m.block_tables.fill_(-1)[:2, : n.block_tables.shape[1]] = n.block_tables
    for mine, its in ((step.query, other.query), (step.key, other.key), (step.value, other.value)):
        mine[:2] = its
    step.kv_cache.fill_(torch.nan)[:, : other.kv_cache.shape[1]] = other.kv_cache
    other.query = F.pad(other.query, (0, 0, 0, 2))
    said = compare(layer, other, replay())
    yield f"{how} with 2 sequences of other lengths in a batch of 4, the rest 0: {said}"


def show_head_sizes(device) -> Iterator[str]:
    for size in (24, 50, 72, 192):  # the old list: 64, 80, 96, 112, 128, 256
        layer = Attention(4, size, size**-0.5, 2, device=device)
        step = make_step(layer, [(0, 5), (6, 2)], [9], device=device)
        yield f"head size {size}: {check(layer, step)}"


def show_slices_of_slopes(device) -> Iterator[str]:
    how, scale = {"sliding_window": 9, "device": device}, 0.2
    slopes = alibi_slopes(6).tolist()  # of the whole model
    whole = Attention(6, 32, scale, 2, slopes, **how)
    step = make_step(whole, [(4, 5)], [9], device=device)
    said = check(whole, step)
    parts = []
    for rank in range(2):
        layer = Attention(3, 32, scale, 1, slopes[3 * rank : 3 * rank + 3], **how)
        heads = [x.unflatten(1, (2, -1))[:, rank] for x in (step.query, step.key, step.value)]
        cache = step.kv_cache.unflatten(2, (BLOCK_SIZE, 2, 32))[..., rank, :].flatten(2)
        parts.append(layer.forward(*(x.contiguous() for x in heads), cache, step.metadata))
    compare(whole, step, torch.cat(parts, dim=1))
    yield f"tensor parallel over 2 ranks, each with its slice of the model's 6 slopes: {said}"


def show_blocks(device) -> Iterator[str]:
    shape = PagedAttention.get_kv_cache_shape(6, BLOCK_SIZE, 2, 16)
    layers = [
        normal(*shape, dtype=torch.float16, generator=generator(i), device=device) for i in (0, 1)
    ]
    old = [x.clone() for x in layers]
    PagedAttention.copy_blocks(layers, {0: [3, 5], 4: [1]})
    origin = [0, 4, 2, 0, 4, 0]
    assert all(same_bytes(new, was[:, origin]) for new, was in zip(layers, old, strict=True))
    yield "copy_blocks(caches of 2 layers, {0: [3, 5], 4: [1]}): K and V, bit for bit"
    host = torch.zeros(shape, dtype=torch.float16)
    PagedAttention.swap_blocks(layers[0], host, {5: 0, 2: 4})
    assert same_bytes(host[:, [0, 4]], layers[0][:, [5, 2]].cpu())
    assert not host[:, [1, 2, 3, 5]].any()
    back = layers[1].clone()
    PagedAttention.swap_blocks(host, back, {4: 1})
    assert same_bytes(back[:, 1], layers[0][:, 2])
    yield f"swap_blocks(source, destination, {{5: 0, 2: 4}}), {device} to cpu and back: K and V"


def show_packed_cache(device) -> Iterator[str]:
    for dtype, kind in ((torch.float16, "auto"), (torch.float32, "auto"), (torch.float16, "fp8")):
        layer = Attention(4, 32, 0.2, 2, kv_cache_dtype=kind, device=device)
        step = make_step(layer, [], [12, 0, 29], dtype=dtype, device=device)
        ours = step.kv_cache.clone()
        # The same tokens as the old kernels stored them, one at a time by their own formula.
        pages = PagedAttention.split_kv_cache(ours, 2, 32)
        key_cache, value_cache = PagedAttention.split_packed_kv_cache(step.kv_cache, 2, 32)
        x = key_cache.shape[-1]
        for offset in range(BLOCK_SIZE):
            key_cache[:, :, :, offset] = pages[0][:, offset].unflatten(-1, (-1, x))
            value_cache[..., offset] = pages[1][:, offset]
        old = step.kv_cache.clone()
        PagedAttention.from_packed(step.kv_cache, 2, 32)
        assert same_bytes(step.kv_cache, ours)
        PagedAttention.to_packed(step.kv_cache, 2, 32)
        assert same_bytes(step.kv_cache, old)
        PagedAttention.from_packed(step.kv_cache, 2, 32)
        what = f"{str(step.kv_cache.dtype).removeprefix('torch.')}, x = {x}"
        said = check(layer, step)
        yield f"a cache packed by the old kernels ({what}) to pages and back, decoded: {said}"


SHOWS: tuple[Callable[..., Iterator[str]], ...] = (
    show_prompts, show_long_alibi, show_prefixes, show_decodes, show_mixed, show_graph,
    show_head_sizes, show_slices_of_slopes, show_blocks, show_packed_cache,
)  # fmt: skip


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The attention layer of early vLLM, shown.")
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
