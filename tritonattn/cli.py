"""The command ``tritonattn``: one module a command, imported when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from . import __version__
from .errors import TritonAttnError

COMMANDS = {
    "autotune": ("commands.autotune", "measure which configuration is fastest on this GPU"),
    "bench": ("bench.command", "time attention beside its peers and the GPU's own limits"),
    "cache": ("commands.cache", "list, show, compare and move tuned tables"),
    "explain": ("commands.explain", "what a call would run, and why; for any GPU"),
    "doctor": ("commands.doctor", "whether this installation works"),
    "fuzz": ("commands.fuzz", "draw random calls and check them against the reference"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1: found something wrong, 2: could not do it, 130: Ctrl-C."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="tritonattn",
        usage="%(prog)s [-h] [--version] COMMAND ...",
        description="Tools of tritonattn, attention for LLM inference in Triton.",
        formatter_class=argparse.RawTextHelpFormatter,
        epilog="`tritonattn COMMAND --help` says more.",
    )
    parser.add_argument("--version", action="version", version=f"tritonattn {__version__}")
    parser.add_argument(
        "command", choices=COMMANDS, metavar="COMMAND",
        help="\n".join(f"{name:9} {what}" for name, (_, what) in COMMANDS.items()),
    )  # fmt: skip
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    if not given:
        parser.print_help()
        return 2
    chosen = parser.parse_args(given)
    name = f"tritonattn {chosen.command}"
    try:
        module = importlib.import_module(f"tritonattn.{COMMANDS[chosen.command][0]}")
        options = argparse.ArgumentParser(
            prog=name, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(options)
        return module.run(options.parse_args(chosen.arguments)) or 0
    except TritonAttnError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"{name}: {error}. {_advice(error.name or '')}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def _advice(module: str) -> str:
    extras = {"hypothesis": "test", "matplotlib": "bench", "rich": "cli", "triton": "triton"}
    extra = extras.get(module.partition(".")[0])
    if extra == "triton":
        return "`tritonattn doctor` says which Triton belongs to this torch."
    return f'pip install "tritonattn[{extra}]" brings it.' if extra else ""
