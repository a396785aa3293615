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
    """The file's tokens, without what no binary depends on."""
    tokens = []
    starts_line = True
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in _LAYOUT:
                starts_line = starts_line or token.type == tokenize.NEWLINE
            elif token.type in (tokenize.INDENT, tokenize.DEDENT):
                tokens.append(tokenize.tok_name[token.type])
            elif not (starts_line and token.type == tokenize.STRING):
                tokens.append(token.string)
                starts_line = False
    return "\n".join(tokens)
