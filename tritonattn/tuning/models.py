"""The attention layers of well-known models, by the names that the command line takes."""

from __future__ import annotations

from dataclasses import dataclass

FUNCTIONS = ("varlen_attention", "prefix_attention", "paged_attention")


@dataclass(frozen=True)
class Layer:
    """One kind of attention layer.  Sizes are the whole model's, before any tensor parallelism."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int = 0  # 0: head_dim
    window: int = 0  # tokens that a query sees, its own included; 0: all
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    query_scale: bool = False
    alibi: bool = False
    latent: bool = False  # cached values are the keys' first dims, in the same memory
    functions: tuple[str, ...] = FUNCTIONS

    @property
    def value_dim(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def title(self) -> str:
        dims = f"{self.head_dim}" if self.value_dim == self.head_dim else (
            f"{self.head_dim}/{self.head_dim_v}"
        )  # fmt: skip
        extras = [
            f"window {self.window}" if self.window else "",
            f"chunk {self.chunk}" if self.chunk else "",
            f"softcap {self.softcap:g}" if self.softcap else "",
            *(name for name in ("sinks", "query_scale", "alibi") if getattr(self, name)),
        ]
        kind = "latent heads" if self.latent else "heads"
        heads = f"{self.num_heads}/{self.num_kv_heads} {kind} of {dims}"
        return ", ".join([heads, *filter(None, extras)])


PRESETS: dict[str, tuple[Layer, ...]] = {
    "llama3-8b": (Layer(32, 8, 128),),
    "llama3-70b": (Layer(64, 8, 128),),
    # Three layers of four are chunked; the fourth sees everything, with a temperature.
    "llama4": (Layer(40, 8, 128, chunk=8192), Layer(40, 8, 128, query_scale=True)),
    "qwen2-7b": (Layer(28, 4, 128),),
    "gemma2-9b": (Layer(16, 8, 256, window=4096, softcap=50.0), Layer(16, 8, 256, softcap=50.0)),
    "gpt-oss": (Layer(64, 8, 64, window=128, sinks=True), Layer(64, 8, 64, sinks=True)),
    "mistral-7b": (Layer(32, 8, 128, window=4096),),
    # Latent attention: prompts with keys and values spelled out, decoding on the latent itself.
    "deepseek-v3": (
        Layer(128, 128, 192, 128, functions=("varlen_attention",)),
        Layer(128, 1, 576, 512, latent=True, functions=("paged_attention",)),
    ),
    "smollm2": (Layer(9, 3, 64),),
}
