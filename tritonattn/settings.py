"""The environment, read once when the package is imported; nothing else reads it.

``TRITONATTN_CHECK=1``      check device values (page ids, lengths, slots): every call synchronises
``TRITONATTN_QUIET=1``      no notices on stderr
``TRITONATTN_CACHE_DIR``    where the user's own tuned tables live
``TRITON_INTERPRET``        Triton's own switch: 0 forbids its interpreter, 1 asks for it; unset, it
                            is used where there is no GPU
"""

from __future__ import annotations

import os


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")


CHECK = _flag("TRITONATTN_CHECK")
QUIET = _flag("TRITONATTN_QUIET")
CACHE_DIR = os.environ.get("TRITONATTN_CACHE_DIR") or None
INTERPRET: bool | None = _flag("TRITON_INTERPRET") if "TRITON_INTERPRET" in os.environ else None
