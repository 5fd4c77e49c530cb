"""Data types shared by :mod:`mtplx.reference` and :mod:`mtplx.sampling`.

Design
------
`SparseDistribution` and `SpeculativeDecision` live in the compiled core, so that its loops reach
their fields without a Python call. What the interpreter asks of a data type (dataclass fields,
frozen attributes, patching of a method on the class) is added here, in a Python subclass with
empty slots; the core is told of the subclass at the end of this file and returns instances of it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtplx._csampling.distributions import (
    SparseDistributionBase,
    SpeculativeDecision,
    register_python_types,
)

__all__ = [
    "Distribution",
    "NonFiniteLogitsError",
    "SamplerConfig",
    "SparseDistribution",
    "SpeculativeDecision",
    "non_finite_logits_error",
]


@dataclass(frozen=True)
class SamplerConfig:
    """How logits become the distribution that is sampled from.

    Fields are kept as they are given; a value outside its range means "off", never an error.

    Parameters
    ----------
    temperature : float
        Divides the logits. Zero or less: greedy, all mass on the largest logit.
    top_p : float
        Nucleus mass: a token is kept while the mass ranked before it is below `top_p`.
        Outside (0, 1): off.
    top_k : int or None
        Number of ranks kept. None, 0 or less, or the vocabulary size or more: off.
    presence_penalty, frequency_penalty : float
        Subtracted from the logit of a token seen before: once, and once per occurrence.
        Clamped to [-2, 2] where they are applied.

    Raises
    ------
    ValueError
        A field is NaN.

    Examples
    --------
    >>> SamplerConfig(0.7, top_k=None)
    SamplerConfig(temperature=0.7, top_p=0.95, top_k=None, presence_penalty=0.0, frequency_penalty=0.0)
    """

    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int | None = 20
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value != value:
                raise ValueError(f"{field.name} is {value!r}")


class NonFiniteLogitsError(ValueError, RuntimeError):
    """Logits from which no distribution follows: NaN, +inf, or nothing above -inf.

    Both a `ValueError` and a `RuntimeError`, since callers in the wild catch either.

    Parameters
    ----------
    message : str
        What was found, and where.
    nan_count, inf_count, vocab_size : int, optional
        Number of NaN entries, of infinite entries (of either sign), and of all entries.
        They are kept as attributes and appended to the text.

    Examples
    --------
    >>> raise NonFiniteLogitsError("row 3", nan_count=1, inf_count=0, vocab_size=8)
    Traceback (most recent call last):
        ...
    mtplx.distributions.NonFiniteLogitsError: row 3 (nan_count=1, inf_count=0, vocab_size=8)
    """

    def __init__(
        self,
        message: str,
        *,
        nan_count: int | None = None,
        inf_count: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.message = message
        self.nan_count = nan_count
        self.inf_count = inf_count
        self.vocab_size = vocab_size
        counts = {"nan_count": nan_count, "inf_count": inf_count, "vocab_size": vocab_size}
        known = ", ".join(f"{name}={count}" for name, count in counts.items() if count is not None)
        super().__init__(f"{message} ({known})" if known else message)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore_error, (self.message, self.nan_count, self.inf_count, self.vocab_size))


def _restore_error(
    message: str, nan_count: int | None, inf_count: int | None, vocab_size: int | None
) -> NonFiniteLogitsError:
    return NonFiniteLogitsError(message, nan_count=nan_count, inf_count=inf_count, vocab_size=vocab_size)


def non_finite_logits_error(logits: Any, where: str) -> NonFiniteLogitsError:
    """Count what is not finite in `logits` and return the error to raise.

    Parameters
    ----------
    logits : array_like of float, any shape
    where : str
        The name that the message begins with.

    Returns
    -------
    NonFiniteLogitsError

    Examples
    --------
    >>> str(non_finite_logits_error([1.0, float("nan")], "target row 2"))
    'target row 2: logits give no distribution (nan_count=1, inf_count=0, vocab_size=2)'
    """
    values = np.asarray(logits)
    if values.dtype.kind != "f":
        values = values.astype(np.float64)
    return NonFiniteLogitsError(
        f"{where}: logits give no distribution",
        nan_count=int(np.count_nonzero(np.isnan(values))),
        inf_count=int(np.count_nonzero(np.isinf(values))),
        vocab_size=int(values.size),
    )


@dataclass(frozen=True, init=False, eq=False)
class SparseDistribution(SparseDistributionBase):
    """A distribution over a vocabulary that names only the tokens of its support.

    Immutable, compared by value, unhashable. Pickling and copying restore the stored bits.

    Parameters
    ----------
    token_ids : array_like of int, shape (n,)
        Distinct ids in [0, `vocab_size`), copied in the order given.
    probs : array_like of float, shape (n,)
        Weights, normalised to sum 1. NaN, infinite and zero weights become 0.0 and stay in the support.
    vocab_size : int

    Raises
    ------
    ValueError
        Not one-dimensional, of different lengths, empty; a negative finite weight; an id outside
        [0, `vocab_size`) or given twice.
    NonFiniteLogitsError
        No weight is positive and finite.

    Examples
    --------
    >>> d = SparseDistribution([7, 3], [3.0, 1.0], 10)
    >>> d.probability(7), d.probability(5)
    (0.75, 0.0)
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # as for list: compared by value, holds arrays

    token_ids: NDArray[np.int64]
    probs: NDArray[np.float64]
    vocab_size: int


Distribution = NDArray[np.float64] | SparseDistribution

register_python_types(SparseDistribution, NonFiniteLogitsError, non_finite_logits_error)
