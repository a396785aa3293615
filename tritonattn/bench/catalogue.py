"""All cases by name.  32 query heads, 8 KV heads, 128 dims, bfloat16, pages of 16, causal unless
their titles say otherwise; "on 8k" is 8192 cached tokens.
"""

from __future__ import annotations

from typing import Any

from .cases import FP8, Case, lognormal

DEFAULT_GROUPS = ("prefill", "prefix", "decode", "spec", "mixed")


def _prefill(title: str, lengths: tuple[int, ...], group: str = "prefill", **options: Any) -> Case:
    return Case(group, title, "varlen_attention", lengths, lengths, **options)


def _prefix(title: str, batch: int, new: int, context: int) -> Case:
    return Case("prefix", title, "prefix_attention", (context,) * batch, (new,) * batch)


def _decode(title: str, lengths: tuple[int, ...], group: str = "decode", **options: Any) -> Case:
    return Case(group, title, "paged_attention", lengths, **options)


def _sweeps() -> list[Case]:
    """One size each, from small to large, and everything else as usual."""
    lengths = [(f"{1 << (power - 10)}k", 1 << power) for power in range(10, 19)]
    batches = [1 << power for power in range(9)]
    many, long, four = (8192,) * 32, (32_768,) * 32, (4096,) * 4
    return [
        *(_decode(f"1 x {name} keys", (n,), "sweep-length") for name, n in lengths),
        *(_decode(f"{batch} x 4k keys", (4096,) * batch, "sweep-batch") for batch in batches),
        *(_prefill(f"1 x {name} tokens", (n,), "sweep-prefill") for name, n in lengths),
        *(
            _decode(f"pages of {size}", many, "sweep-page", page_size=size)
            for size in (1, 4, 8, 12, 16, 32, 64, 128, 256)
        ),
        *(
            _decode(f"window {window}", long, "sweep-window", window=window)
            for window in (128, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
        ),
        *(
            _decode(f"32/{heads} heads", many, "sweep-ratio", heads=(32, heads))
            for heads in (32, 16, 8, 4, 2, 1)
        ),
        *(
            _decode(f"D {dim}", many, "sweep-dim", head_dims=(dim, dim))
            for dim in (32, 64, 80, 96, 112, 128, 192, 256)
        ),
        *(
            _prefill(f"D {dim}", four, "sweep-prefill-dim", head_dims=(dim, dim))
            for dim in (32, 64, 80, 96, 112, 128, 192, 256)
        ),
    ]


def _all() -> list[Case]:
    long, four = (16_384,), (4096,) * 4
    mixed, many = lognormal(64, 262_144), (8192,) * 32
    of_long: dict[str, Any] = {"plain": "prefill 1 x 16k"}
    of_four: dict[str, Any] = {"plain": "prefill 4 x 4k"}
    of_many: dict[str, Any] = {"plain": "decode 32 x 8k"}
    cases = [
        _prefill("1 x 16k", long),
        _prefill("4 x 4k", four),
        _prefill("32 x 512", (512,) * 32),
        _prefill("32 mixed, 16k in all", lognormal(32, 16_384)),
        _prefill("4 x 4k, not causal", four, causal=False),
        _prefill("1 x 16k, not causal", long, causal=False),
        _prefill("4 x 4k, D 64", four, head_dims=(64, 64)),
        _prefill("4 x 4k, D 256, 16/8 heads", four, head_dims=(256, 256), heads=(16, 8)),
        _prefill("4 x 4k, 32/32 heads", four, heads=(32, 32)),
        _prefill("1 x 16k, window 4096", long, window=4096, **of_long),
        _prefill("1 x 16k, chunk 8192", long, chunk=8192, **of_long),
        _prefill(
            "4 x 4k, ALiBi, 32/32 heads", four, heads=(32, 32), alibi=True,
            plain="prefill 4 x 4k, 32/32 heads",
        ),
        _prefill("4 x 4k, softcap 50", four, softcap=50.0, **of_four),
        _prefill("4 x 4k, sinks", four, sinks=True, **of_four),
        _prefill("4 x 4k, query_scale", four, query_scale=True, **of_four),
        _prefill("4 x 4k, lse", four, lse=True, **of_four),
        _prefix("8 x 512 new on 8k", 8, 512, 8192),
        _prefix("2k new on 32k", 1, 2048, 32_768),
        _prefix("16 x 128 new on 4k", 16, 128, 4096),
        _decode("1 x 8k", (8192,)),
        _decode("1 x 128k", (131_072,)),
        _decode("8 x 32k", (32_768,) * 8),
        _decode("32 x 4k", (4096,) * 32),
        _decode("128 x 4k", (4096,) * 128),
        _decode("32 x 8k", many),
        _decode("64 mixed, 256k keys in all", mixed),
        _decode("64 mixed, page 1", mixed, page_size=1),
        _decode("64 mixed, page 12", mixed, page_size=12),
        _decode("64 mixed, page 64", mixed, page_size=64),
        _decode("64 mixed, page 256", mixed, page_size=256),
        _decode("32 x 8k, 64/8 heads", many, heads=(64, 8)),
        _decode("32 x 8k, 32/32 heads", many, heads=(32, 32)),
        _decode("32 x 8k, 28/4 heads (7:1)", many, heads=(28, 4)),
        _decode("32 x 8k, 32/1 heads (32:1)", many, heads=(32, 1)),
        _decode("32 x 32k, window 4096", (32_768,) * 32, window=4096),
        _decode("32 x 8k, fp8 cache", many, cache_dtype=FP8, **of_many),
        _decode(
            "32 x 8k, fp8 cache, 64/8 heads", many, cache_dtype=FP8, heads=(64, 8),
            plain="decode 32 x 8k, 64/8 heads",
        ),
        _decode("32 x 8k, ALiBi", many, alibi=True, **of_many),
        _decode("32 x 8k, softcap 50", many, softcap=50.0, **of_many),
        _decode("32 x 8k, sinks", many, sinks=True, **of_many),
        _decode("32 x 8k, batch-invariant", many, batch_invariant=True, **of_many),
        _decode(
            "64 mixed, batch-invariant", mixed, batch_invariant=True,
            plain="decode 64 mixed, 256k keys in all",
        ),
        _decode("32 x 8k, D 64", many, head_dims=(64, 64)),
        _decode("32 x 8k, D 96", many, head_dims=(96, 96)),
        _decode("32 x 8k, D 192/128", many, head_dims=(192, 128)),
        _decode("32 x 8k, D 256", many, head_dims=(256, 256)),
        # Latent attention of one rank of eight: 128 query heads of the model, 16 here.
        _decode(
            "32 x 8k, D 576/512, 16/1 heads", many, head_dims=(576, 512), heads=(16, 1), latent=True
        ),
        Case("spec", "16 x 4 queries on 8k", "paged_attention", (8192,) * 16, (4,) * 16),
        Case(
            "mixed", "63 decodes on 4k + 1k prefill", "paged_attention",
            (4096,) * 63 + (1024,), (1,) * 63 + (1024,),
        ),
    ]  # fmt: skip
    cases += _sweeps()
    small: dict[str, Any] = {"heads": (4, 2), "head_dims": (64, 64), "group": "smoke"}
    cases += [
        _prefill("tiny prefill", (33, 20), **small),
        Case("smoke", "tiny prefix", "prefix_attention", (24, 5), (9, 3), (4, 2), (64, 64)),
        _decode("tiny decode", (50, 3), **small),
        Case("smoke", "tiny mixed", "paged_attention", (40, 17), (1, 9), (4, 2), (64, 64)),
    ]
    return cases


ALL = tuple(_all())
SWEEPS = tuple(
    dict.fromkeys(case.group.removeprefix("sweep-") for case in ALL if "sweep-" in case.group)
)
