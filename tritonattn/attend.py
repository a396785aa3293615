"""A call's whole way: validate, plan, configure, launch."""

from __future__ import annotations

import functools
from collections.abc import Callable

from . import settings
from .call import Call, Result
from .checks import check_values
from .problem import Problem
from .validate import validate


def attend(call: Call) -> Result:
    problem = validate(call)
    if settings.CHECK:
        check_values(call, problem)
    return _launcher()(call, problem)


@functools.cache
def _launcher() -> Callable[[Call, Problem], Result]:
    """Found at the first call, so that importing the package neither imports triton nor asks for a
    GPU; and kept, as an import statement costs each call half a microsecond."""
    from .launch import attend

    return attend
