"""Arguments that are numbers or tokens, checked with messages that name the argument and what was given."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

__all__ = ["as_count", "as_integer", "as_real", "as_tokens"]


def as_integer(value: Any, name: str) -> int:
    """The integer that `value` stands for (`int`, NumPy's, anything with ``__index__``), else TypeError."""
    if not hasattr(type(value), "__index__"):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    try:
        return operator.index(value)
    except TypeError as error:  # as of an array of several
        raise TypeError(f"{name} must be an integer, not {value!r}") from error


def as_real(value: Any, name: str) -> float:
    """The real number that `value` stands for, else TypeError; ``float`` alone would read text, too."""
    kind = type(value)
    if issubclass(kind, str | bytes) or not (hasattr(kind, "__float__") or hasattr(kind, "__index__")):
        raise TypeError(f"{name} must be a real number, not {value!r}")
    try:
        return float(value)
    except TypeError as error:  # as of an array of several
        raise TypeError(f"{name} must be a real number, not {value!r}") from error


def as_count(value: Any, name: str, least: int) -> int:
    """The same of at least `least`, else ValueError."""
    count = as_integer(value, name)
    if count < least:
        raise ValueError(f"{name} must be at least {least}; got {count}")
    return count


def as_tokens(values: Iterable[Any], vocab_size: int) -> list[int]:
    """Tokens of a vocabulary, else TypeError or IndexError."""
    tokens = [as_integer(value, "a token") for value in values]
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise IndexError(f"token {token} is outside [0, {vocab_size})")
    return tokens
