"""What the documentation shows does what it says: docstrings' examples, README's code and names."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

import tritonattn
from tritonattn.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OPTIONAL = ("matplotlib", "rich", "transformers", "vllm")


def modules_with_examples() -> list[str]:
    """Found by their text: nothing is imported that has none."""
    found = []
    for module in pkgutil.walk_packages(tritonattn.__path__, "tritonattn."):
        spec = module.module_finder.find_spec(module.name, None)  # type: ignore[call-arg]
        if spec is not None and spec.origin and ">>> " in Path(spec.origin).read_text("utf-8"):
            found.append(module.name)
    return found


@pytest.mark.parametrize("name", modules_with_examples())
def test_docstring_examples_run(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS, verbose=False)
    assert result.attempted > 0
    assert result.failed == 0


def test_every_public_function_has_an_example() -> None:
    for name in tritonattn.__all__:
        value = getattr(tritonattn, name)
        if inspect.isfunction(value):
            assert ">>> " in inspect.getdoc(value), name


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


@pytest.mark.parametrize(
    "code", blocks("python"), ids=lambda code: code.strip().splitlines()[-1][:40]
)
def test_readme_code_runs(code: str) -> None:
    optional = re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)
    for package in set(optional) - {"torch", "tritonattn"}:
        pytest.importorskip(package, reason=f"{package} is not installed")
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_readme_names_every_public_function() -> None:
    for name in tritonattn.__all__:
        if inspect.isfunction(getattr(tritonattn, name)):
            assert f"`{name}" in README, name


def test_readme_names_every_option_with_its_default() -> None:
    parameters = inspect.signature(tritonattn.varlen_attention).parameters.values()
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            assert f"`{parameter.name}={parameter.default!r}`" in README, parameter.name


def test_readme_names_files_that_exist() -> None:
    for path in set(re.findall(r"(?:examples|tests|tritonattn)/[\w/]+\.py", README)):
        assert (ROOT / path).is_file(), path


def test_readme_names_every_command() -> None:
    for command in COMMANDS:
        assert re.search(rf"tritonattn {command}\b", README), command


@pytest.mark.parametrize(
    "shown",
    [block for block in blocks("") if block.startswith("$ tritonattn")],
    ids=lambda shown: shown.splitlines()[0],
)
def test_readme_shows_what_a_command_prints(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *lines = shown.rstrip().splitlines()
    assert main(shlex.split(command)[2:]) == 0
    printed = capsys.readouterr().out
    for line in lines:
        if line.startswith("binary"):  # registers depend on the version of triton
            line = line.split(":")[0]
        assert line in printed
