"""A hash of the kernels' source: measurements of one source say little about another."""

from __future__ import annotations

import functools
import hashlib
import tokenize
from pathlib import Path

KERNELS = Path(__file__).parent.parent / "kernels"
_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
_FSTRING_START = getattr(tokenize, "FSTRING_START", -1)
_FSTRING_END = getattr(tokenize, "FSTRING_END", -1)


@functools.cache
def source_hash() -> str:
    """Of every kernel and helper as they lie on the disk; comments and docstrings do not count."""
    return hash_of(KERNELS)


def hash_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\n".encode())
        digest.update(_code(path).encode())
    return digest.hexdigest()[:12]


def _code(path: Path) -> str:
    """The file's tokens, without what no binary depends on; the same in every Python."""
    tokens = []
    starts_line = True
    depth, first = 0, (0, 0)  # f-strings around the token, and where the outermost began
    lines = path.read_text("utf-8").splitlines(keepends=True)
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            # From Python 3.12 on an f-string is many tokens, before it is one.
            depth += (token.type == _FSTRING_START) - (token.type == _FSTRING_END)
            if token.type == _FSTRING_START and depth == 1:
                first = token.start
            elif token.type == _FSTRING_END and depth == 0:
                tokens.append(_between(lines, first, token.end))
                starts_line = False
            elif depth > 0:
                continue
            elif token.type in _LAYOUT:
                starts_line = starts_line or token.type == tokenize.NEWLINE
            elif token.type in (tokenize.INDENT, tokenize.DEDENT):
                tokens.append(tokenize.tok_name[token.type])
            elif not (starts_line and token.type == tokenize.STRING):
                tokens.append(token.string)
                starts_line = False
    return "\n".join(tokens)


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """The text between two places, each a row, from 1 on, and a column."""
    text = "".join(lines[start[0] - 1 : end[0]])
    return text[start[1] : len(text) - len(lines[end[0] - 1]) + end[1]]
