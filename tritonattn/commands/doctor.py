"""``tritonattn doctor``: whether this installation works, found out by using it."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from .. import __version__, settings
from ..errors import TritonAttnError

DESCRIPTION = """\
Looks at versions, GPU and tuned tables, and runs one small call of each kernel family against the
reference. Exit code 1: something is wrong."""
OK, NOTE, WRONG = "ok", "note", "wrong"
_WIDTH = {OK: "  ok ", NOTE: " note", WRONG: "WRONG"}
# A small call of each, and one that is long enough for Hopper's own kernel: function, lengths.
_CALLS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...] | None]] = {
    "prefill": ("varlen_attention", (5, 20), (5, 20)),
    "long": ("varlen_attention", (400, 150), (400, 150)),
    "prefix": ("prefix_attention", (5, 20), (3, 1)),
    "decode": ("paged_attention", (5, 33), None),
    "paged": ("paged_attention", (5, 33), (4, 1)),
}


@dataclass
class Finding:
    what: str
    status: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--no-run", action="store_true", help="run no kernel")


def run(args: argparse.Namespace) -> int:
    findings: list[Finding] = []
    for finding in _findings(args.no_run):
        findings.append(finding)
        if not args.json:
            print(f"{_WIDTH[finding.status]}  {finding.what:11} {finding.text}", flush=True)
    bad = sum(finding.status == WRONG for finding in findings)
    if args.json:
        document = {"ok": not bad, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(document, indent=1))
    else:
        print(f"{bad} of {len(findings)} things are wrong." if bad else "All is well.")
    return 1 if bad else 0


def _findings(no_run: bool) -> Iterator[Finding]:
    yield _python()
    yield from _guarded("torch", _torch)
    triton = list(_triton())
    yield from triton
    machine = list(_guarded("machine", _machine))
    yield from machine
    can_run = not any(finding.status == WRONG for finding in (*triton, *machine))
    if not any(finding.status == WRONG for finding in machine):
        yield from _guarded("tables", _tables)
    if no_run or not can_run:
        yield Finding("kernels", NOTE, "none was run")
        return
    for family in _CALLS:
        if family == "long" and _arch() != 90:
            continue
        yield from _guarded(family, functools.partial(_kernel, family))
    yield from _guarded("cache", _cache_write)


def _guarded(what: str, look: Callable[[], Finding | Iterator[Finding]]) -> Iterator[Finding]:
    """A look that fails is a finding too: whatever is broken here, the others are still wanted."""
    try:
        found = look()
        yield from ([found] if isinstance(found, Finding) else found)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        yield Finding(what, WRONG, f"{type(error).__name__}: {lines[0]}")


def _python() -> Finding:
    text = f"tritonattn {__version__}, Python {platform.python_version()}, {platform.platform()}"
    if platform.system() == "Darwin":
        return Finding("package", WRONG, f"{text}: there is no Triton for macOS")
    return Finding("package", OK, text)


def _torch() -> Finding:
    import torch

    numpy = importlib.metadata.version("numpy")
    kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU"
    kind = f"ROCm {torch.version.hip}" if torch.version.hip else kind
    status = OK if _numbers(torch.__version__) >= (2, 10) else WRONG
    needed = "" if status == OK else ": at least 2.10 is needed"
    return Finding("torch", status, f"torch {torch.__version__} {kind}, numpy {numpy}{needed}")


def _triton() -> Iterator[Finding]:
    owners = sorted(set(importlib.metadata.packages_distributions().get("triton", [])))
    if len(owners) > 1:
        names = " and ".join(f"{name} {importlib.metadata.version(name)}" for name in owners)
        yield Finding(
            "triton", WRONG,
            f"{names} both bring the package triton, one written over the other: uninstall both, "
            "then install the one that belongs to this torch",
        )  # fmt: skip
    try:
        import triton
    except ImportError as error:
        advice = 'pip install "tritonattn[triton]" brings it for a torch for CUDA or the CPU'
        yield Finding("triton", WRONG, f"{error}: {advice}; torch for ROCm or XPU brings its own")
        return
    if _numbers(triton.__version__) < (3, 6):
        yield Finding("triton", WRONG, f"triton {triton.__version__}: at least 3.6 is needed")
    elif len(owners) < 2:
        yield Finding("triton", OK, f"{' '.join(owners) or 'triton'} {triton.__version__}")


def _machine() -> Iterator[Finding]:
    import torch

    from .. import device as devices
    from .shapes import here

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices.interpreting():
        why = "TRITON_INTERPRET asks for it" if settings.INTERPRET else "no GPU was found"
        text = f"kernels run through Triton's interpreter, right but slow: {why}"
        yield Finding("machine", NOTE, text)
    elif not found:
        yield Finding(
            "machine", WRONG,
            "there is no GPU, and TRITON_INTERPRET=0 forbids the interpreter: unset it",
        )  # fmt: skip
    else:
        _, gpu = here()
        text = (
            f"{gpu.title}, {gpu.sm_count} multiprocessors, {gpu.shared_memory // 1024} KiB shared "
            f"memory a block, {'bfloat16' if gpu.has_bf16 else 'no bfloat16'}; {found} in all"
        )
        yield Finding("machine", OK, text)
    if settings.CHECK:
        yield Finding("settings", NOTE, "TRITONATTN_CHECK=1: every call waits for the GPU")


def _tables() -> Iterator[Finding]:
    from ..tuning import store
    from ..tuning.keys import FAMILIES
    from ..tuning.models import PRESETS
    from ..tuning.tables import TableError, read
    from ..tuning.tasks import tasks
    from .shapes import here

    for name, root in store.roots():
        for path in sorted(root.glob("*/*.json")):
            if path.stem in FAMILIES:
                try:
                    read(path)
                except (TableError, OSError) as error:
                    yield Finding("tables", WRONG, f"{name}: {error}")
    _, gpu = here()
    if gpu.is_interpreter:
        yield Finding("tables", NOTE, "none is used by the interpreter")
        return
    origins = {task.family: store.find(task.problem, gpu).origin for task in
               reversed(tasks(PRESETS["llama3-8b"]))}  # fmt: skip
    text = ", ".join(f"{family} {origin}" for family, origin in sorted(origins.items()))
    hit = "heuristic" not in origins.values()
    advice = "" if hit else "; `tritonattn autotune` measures this GPU"
    yield Finding("tables", OK if hit else NOTE, f"Llama 3 8B in bfloat16: {text}{advice}")


def _arch() -> int | str:
    from .shapes import here

    return here()[1].arch


def _kernel(family: str) -> Finding:
    import torch

    from ..testing import Case, check
    from .shapes import here

    where, gpu = here()
    dtype = torch.bfloat16 if gpu.has_bf16 else torch.float16
    function, k_lens, q_lens = _CALLS[family]
    heads = (16, 8) if family == "long" else (4, 2)
    case = Case(function, k_lens, q_lens, heads, dtype=dtype, poison="nan")
    try:
        check(case, device=where)
    except AssertionError as error:
        return Finding(family, WRONG, f"{function} is not right: {str(error).splitlines()[0]}")
    except TritonAttnError as error:
        return Finding(family, WRONG, str(error))
    return Finding(family, OK, f"{function} agrees with the reference in {str(dtype)[6:]}")


def _cache_write() -> Finding:
    import torch

    from ..kv_cache import write_kv_cache
    from .shapes import here

    where, _ = here()
    k, v = torch.arange(2 * 3 * 64.0, device=where).view(2, 3, 1, 64).half()
    k_cache, v_cache = torch.zeros(2, 2, 4, 1, 64, dtype=k.dtype, device=where)
    slots = torch.tensor([5, -1, 0], device=where)
    write_kv_cache(k, v, k_cache, v_cache, slots)
    rows = torch.stack((k_cache.view(8, 64), v_cache.view(8, 64)))
    right = torch.zeros_like(rows)
    for cache, new in zip(right, (k, v), strict=True):
        cache[5], cache[0] = new[0, 0], new[2, 0]
    is_right = torch.equal(rows, right)
    text = "write_kv_cache writes its slots and no others"
    return Finding("cache", OK if is_right else WRONG, text if is_right else f"not so: {text}")


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)
