"""The arguments that say which calls a command is about, and for which GPU."""

from __future__ import annotations

import argparse
import itertools
import re

import torch

from .. import device as devices
from ..device import SHARED_MEMORY, Device
from ..errors import ArgumentValueError, UnsupportedError
from ..problem import FP8_FORMATS
from ..tuning.keys import DTYPES, FAMILIES
from ..tuning.models import PRESETS, Layer
from ..tuning.tasks import Shape, Task, tasks

# Of a typical GPU of each architecture: how many programs fill it decides a plan.
MULTIPROCESSORS = {
    75: 40, 80: 108, 86: 84, 87: 16, 89: 142, 90: 132, 100: 148, 103: 160, 110: 20, 120: 188,
    121: 48, "gfx90a": 104, "gfx942": 304, "gfx950": 256, "gfx1100": 96, "gfx1101": 60,
    "gfx1200": 32, "gfx1201": 64,
}  # fmt: skip
QUERIES = "same"  # a cache's dtype
_SIZE = re.compile(r"(\d+)(k?)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--preset", nargs="+", default=[], choices=[*PRESETS, "custom", "all"], metavar="MODEL",
        help=f"{', '.join(PRESETS)}, all of them (all), or custom with --heads and --head-dims",
    )  # fmt: skip
    add(
        "--kernel", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY",
        help=f"of {', '.join(FAMILIES)}; default: all",
    )  # fmt: skip
    add(
        "--shape", nargs="+", default=[], type=_shape, metavar="BxQ@K",
        help="B sequences of Q queries on K keys: 32x1@8k, 4x4k@4k, 63x1+1024@4k (one more, of "
        "1024 queries); default: some of each kernel",
    )  # fmt: skip
    add("--dtype", nargs="+", choices=DTYPES.values(), default=["bf16"])
    add(
        "--cache-dtype", nargs="+", choices=[QUERIES, *FP8_FORMATS.values()], default=[QUERIES],
        help=f"default: {QUERIES}, that of the queries",
    )  # fmt: skip
    add("--page-size", nargs="+", type=at_least_one, default=[16], metavar="TOKENS")
    add("--batch-invariant", action="store_true")
    custom = parser.add_argument_group("for --preset custom")
    add = custom.add_argument
    add("--heads", type=_pair, metavar="HQ/HKV", help="such as 32/8")
    add("--head-dims", type=_pair, metavar="D[/DV]", help="such as 128 or 192/128")
    add("--latent", action="store_true", help="cached values are the keys' first DV dims")
    add("--window", type=at_least_one, default=0, metavar="TOKENS", help="the query's own counted")
    add("--chunk", type=at_least_one, default=0, metavar="TOKENS")
    add("--softcap", type=float, default=0.0, metavar="C")
    add("--sinks", action="store_true")
    add("--alibi", action="store_true")
    add("--query-scale", action="store_true")
    add("--not-causal", action="store_true")


def add_target(parser: argparse.ArgumentParser, what: str) -> None:
    known = ", ".join(
        f"sm_{arch}" if isinstance(arch, int) else str(arch) for arch in SHARED_MEMORY
    )
    parser.add_argument("--target", type=_target, metavar="ARCH", help=f"{what}: {known}")
    parser.add_argument(
        "--sms", type=at_least_one, metavar="N", help="multiprocessors of --target's GPU"
    )


def tasks_of(args: argparse.Namespace, default: str = "llama3-8b") -> list[Task]:
    """Raises ArgumentValueError for arguments that contradict."""
    names = args.preset or (["custom"] if args.heads else [default])
    layers: list[Layer] = []
    for name in names:
        if name == "custom":
            layers.append(_custom(args))
        else:
            layers += [
                layer for preset in (PRESETS if name == "all" else [name])
                for layer in PRESETS[preset]
            ]  # fmt: skip
    if "custom" not in names and (args.heads or args.head_dims):
        raise _refusal("--heads and --head-dims belong to --preset custom; give that or neither")
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    caches = {name: dtype for dtype, name in FP8_FORMATS.items()}
    # Nearest to the first of each first, and of these other caches before other pages, whose
    # configurations differ less.
    variants = sorted(
        itertools.product(
            enumerate(args.dtype), enumerate(args.cache_dtype), enumerate(args.page_size)
        ),
        key=lambda variant: (sum(i for i, _ in variant), variant[2][0]),
    )
    found = tasks(
        layers, args.kernel, args.shape,
        [
            {"dtype": dtypes[dtype], "cache_dtype": caches.get(cache), "page_size": size}
            for (_, dtype), (_, cache), (_, size) in variants
        ],
        causal=not args.not_causal, batch_invariant=args.batch_invariant,
    )  # fmt: skip
    if not found:
        raise _refusal(
            f"no {' or '.join(args.kernel)} kernel takes these shapes: decode is one query a "
            "sequence, paged several, and a sequence has no more queries than keys"
        )
    return found


def device_of(args: argparse.Namespace) -> Device:
    """What --target says, or this machine's GPU, or the interpreter."""
    if args.target is not None:
        arch = args.target
        return devices.target(arch, sm_count=args.sms or MULTIPROCESSORS.get(arch, 108))
    if args.sms:
        raise _refusal("--sms belongs to --target")
    return here()[1]


def here() -> tuple[torch.device, Device]:
    """Where tensors go on this machine, and what it is."""
    if devices.interpreting():
        return torch.device("cpu"), devices.INTERPRETER
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "there is no GPU, and TRITON_INTERPRET=0 forbids the interpreter: unset it, or give "
            "--target to a command that has it"
        )
    where = torch.device("cuda", torch.cuda.current_device())
    return where, devices.describe(where)


def _custom(args: argparse.Namespace) -> Layer:
    if not args.heads or not args.head_dims:
        raise _refusal("--preset custom wants --heads and --head-dims, such as --heads 32/8 "
                       "--head-dims 128")  # fmt: skip
    (heads, kv_heads), (dim, dim_v) = args.heads, args.head_dims
    if heads % kv_heads:
        raise _refusal(f"--heads: {heads} query heads are no multiple of {kv_heads} KV heads")
    if not (dim <= 576 and dim_v <= 512):
        raise _refusal(f"--head-dims: at most 576/512; got {dim}/{dim_v}")
    if args.latent and dim_v >= dim:
        raise _refusal(f"--latent: values are a part of the keys; got {dim}/{dim_v} dims")
    return Layer(
        heads, kv_heads, dim, dim_v, args.window, args.chunk, args.softcap, args.sinks,
        args.query_scale, args.alibi, args.latent,
    )  # fmt: skip


def _refusal(message: str) -> ArgumentValueError:
    return ArgumentValueError(message)


def at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {text}")
    return value


def above_zero(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0; got {text}")
    return value


def _pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition("/")
    return at_least_one(first), at_least_one(second or first)


def _shape(text: str) -> Shape:
    found = re.fullmatch(r"(\d+)x(\d+k?)(?:\+(\d+k?))?@(\d+k?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"a shape is BxQ@K, such as 32x1@8k; got {text}")
    batch, q, chunk, k = found.groups()
    shape = Shape(int(batch), _tokens(q), _tokens(k), _tokens(chunk or "0"))
    if min(shape[:3]) < 1 or shape.q > shape.k:
        raise argparse.ArgumentTypeError(f"sizes are at least 1, and Q at most K; got {text}")
    return shape


def _tokens(text: str) -> int:
    found = _SIZE.fullmatch(text)
    assert found is not None
    return int(found[1]) * (1024 if found[2] else 1)


def _target(text: str) -> int | str:
    name = text.lower().removeprefix("cuda:").removeprefix("sm_").removeprefix("hip:")
    arch: int | str = int(name) if name.isdigit() else name
    if arch not in SHARED_MEMORY:
        raise argparse.ArgumentTypeError(f"no GPU is known as {text}")
    return arch
