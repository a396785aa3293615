"""The exceptions, and the one place that words a message.

A message names the function and the argument, the rule, what came, and the way out:
``paged_attention: block_table must be int32 or int64 [batch, max_pages]; got float32 [8, 40]. Pass
block_table.int().``
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class TritonAttnError(Exception):
    """Base of every error that this package raises for a caller's mistake."""


class ArgumentValueError(TritonAttnError, ValueError):
    """An argument has the right type and a wrong value, shape, stride or device."""


class ArgumentTypeError(TritonAttnError, TypeError):
    """An argument has the wrong type or dtype."""


class UnsupportedError(TritonAttnError, RuntimeError):
    """The machine cannot do what was asked; the message names the limit and the nearest way out."""


class Text(NamedTuple):
    """A text that ``describe`` passes on without quotes.

    No subclass of str: the compiler of torch 2.11 constructs none, and the message of a bad call
    would be lost while it is traced.
    """

    text: str


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(value: object) -> str:
    """What came, in a message's words: ``float32 [8, 40]`` for a tensor, else the repr."""
    if isinstance(value, Text):
        return value.text
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)}"
    return repr(value)


def bad_value(function: str, argument: str, rule: str, got: object, fix: str) -> ArgumentValueError:
    """``rule`` continues the argument's name; ``got`` is a value to describe or a ready text."""
    return ArgumentValueError(_message(function, argument, rule, got, fix))


def bad_type(function: str, argument: str, rule: str, got: object, fix: str) -> ArgumentTypeError:
    return ArgumentTypeError(_message(function, argument, rule, got, fix))


def unsupported(function: str, argument: str, rule: str, got: object, fix: str) -> UnsupportedError:
    return UnsupportedError(_message(function, argument, rule, got, fix))


def _message(function: str, argument: str, rule: str, got: object, fix: str) -> str:
    return f"{function}: {argument} {rule}; got {describe(got)}. {fix}"
