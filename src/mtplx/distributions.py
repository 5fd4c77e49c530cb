"""Data types shared by :mod:`mtplx.reference` and :mod:`mtplx.sampling`.

Design
------
`SparseDistribution` and `SpeculativeDecision` live in the compiled core, so that its loops reach
their fields without a Python call. What the interpreter asks of a data type (dataclass fields,
frozen attributes, patching of a method on the class) is added here, in a Python subclass with
empty slots; the core is told of the subclass at the end of this file and returns instances of it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtplx._csampling.distributions import (
    SparseDistributionBase,
    SpeculativeDecision,
    register_python_types,
    restore,
)
from mtplx._csampling.draws import sample_from_distribution

__all__ = [
    "BatchedSparseDistributions",
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


@dataclass(frozen=True, init=False, eq=False)
class BatchedSparseDistributions:
    """N sparse distributions over one vocabulary, as two arrays.

    Immutable, compared by value, unhashable. Pickling and copying restore the stored bits.

    Parameters
    ----------
    token_ids : array_like of int, shape (N, k)
        Row by row distinct ids in [0, `vocab_size`), kept in the order given; -1 where a row has fewer
        than k tokens.
    probs : array_like of float, shape (N, k)
        Weights; every row is normalised to sum 1. 0 where the id is -1. NaN and infinite weights become
        0.0 and stay in the support.
    vocab_size : int

    Raises
    ------
    ValueError
        Not two-dimensional, of different shapes; padding with a probability; in a row: no token, a
        negative finite weight, an id outside [0, `vocab_size`) or given twice. The message names the row.
    NonFiniteLogitsError
        A row without a positive finite weight.

    Examples
    --------
    >>> batch = BatchedSparseDistributions([[7, 3], [5, -1]], [[3.0, 1.0], [2.0, 0.0]], vocab_size=10)
    >>> len(batch), batch.probability(0, 7), batch.probability(1, -1)
    (2, 0.75, 0.0)
    >>> batch.to_distribution(1)
    SparseDistribution(token_ids=array([5]), probs=array([1.]), vocab_size=10)
    """

    __hash__ = None  # type: ignore[assignment]  # as for list: compared by value, holds arrays

    token_ids: NDArray[np.int64]
    probs: NDArray[np.float64]
    _: KW_ONLY
    vocab_size: int

    def __init__(self, token_ids: Any, probs: Any, *, vocab_size: int) -> None:
        ids, weights = np.asarray(token_ids), np.asarray(probs)
        if ids.ndim != 2 or weights.ndim != 2 or ids.shape != weights.shape:
            raise ValueError(
                f"token_ids and probs must have one shape (N, k), not {ids.shape} and {weights.shape}"
            )
        size = _as_vocabulary_size(vocab_size)
        stored_ids = np.full(ids.shape, -1, dtype=np.int64)
        stored_probs = np.zeros(ids.shape)
        for row in range(ids.shape[0]):
            with errors_at(f"row {row}"):
                held = ids[row] != -1
                given = weights[row][~held]
                if ((given != 0) & (given == given)).any():  # NaN counts as 0 here as everywhere
                    raise ValueError("padding (id -1) with a probability")
                one = SparseDistribution(ids[row][held], weights[row][held], size)
                stored_ids[row, held] = one.token_ids
                stored_probs[row, held] = one.probs
        self._store(stored_ids, stored_probs, size)

    def _store(self, token_ids: NDArray[np.int64], probs: NDArray[np.float64], vocab_size: int) -> None:
        object.__setattr__(self, "token_ids", _sealed(token_ids))
        object.__setattr__(self, "probs", _sealed(probs))
        object.__setattr__(self, "vocab_size", vocab_size)

    @classmethod
    def from_distributions(
        cls, distributions: Sequence[SparseDistribution], *, vocab_size: int, width: int | None = None
    ) -> BatchedSparseDistributions:
        """Stack sparse distributions; their stored bits are kept, nothing is normalised again.

        Parameters
        ----------
        distributions : sequence of SparseDistribution
        vocab_size : int
        width : int, optional
            k; default the largest number of tokens.

        Raises
        ------
        ValueError
            A distribution has more than `width` tokens, or another `vocab_size`; a negative `width`.
        TypeError
            Something else among them.

        Examples
        --------
        >>> one = SparseDistribution([7, 3], [3.0, 1.0], 10)
        >>> BatchedSparseDistributions.from_distributions([one], vocab_size=10, width=3).token_ids
        array([[ 7,  3, -1]])
        """
        size, counts = _as_vocabulary_size(vocab_size), []
        for row, one in enumerate(distributions):
            if not isinstance(one, SparseDistribution):
                raise TypeError(f"row {row} must be a SparseDistribution, not {type(one).__name__}")
            counts.append(one.token_ids.size)
        k = max(counts, default=0) if width is None else _as_integer(width, "width")
        if k < 0:
            raise ValueError(f"width must not be negative; it is {k}")
        token_ids = np.full((len(counts), k), -1, dtype=np.int64)
        probs = np.zeros((len(counts), k))
        for row, (one, count) in enumerate(zip(distributions, counts, strict=True)):
            if count > k or one.vocab_size != size:
                raise ValueError(
                    f"row {row} has {count} tokens of {one.vocab_size}; expected at most {k} of {size}"
                )
            token_ids[row, :count] = one.token_ids
            probs[row, :count] = one.probs
        made = cls.__new__(cls)
        made._store(token_ids, probs, size)
        return made

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchedSparseDistributions):
            return NotImplemented
        return (
            self.vocab_size == other.vocab_size
            and np.array_equal(self.token_ids, other.token_ids)
            and np.array_equal(self.probs, other.probs)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore_batch, (type(self), self.token_ids, self.probs, self.vocab_size))

    def _row(self, row: int) -> int:
        index = _as_integer(row, "a row")
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} is outside [0, {len(self)})")
        return index

    def probability(self, row: int, token_id: int) -> float:
        """Probability of `token_id` in a row; 0.0 for any integer outside its support, -1 included."""
        index, token = self._row(row), _as_integer(token_id, "a token id")
        if not 0 <= token < self.vocab_size:
            return 0.0
        return float(self.probs[index][self.token_ids[index] == token].sum())

    def to_distribution(self, row: int) -> SparseDistribution:
        """One row, without its padding, with the bits that are stored."""
        index = self._row(row)
        held = self.token_ids[index] >= 0
        one: SparseDistribution = restore(
            SparseDistribution, self.token_ids[index][held], self.probs[index][held], self.vocab_size
        )
        return one

    def sample(self, row: int, rng: Any = None) -> int:
        """Draw one token of a row, as `mtplx.sampling.sample_from_distribution` does."""
        return sample_from_distribution(self.to_distribution(row), rng)


def _as_integer(value: Any, name: str) -> int:
    # As in mtplx.arguments, which an engine that takes this file and the core has not got.
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an integer, not {value!r}") from error


def _as_vocabulary_size(value: Any) -> int:
    size = _as_integer(value, "vocab_size")
    if not 0 < size < 1 << 63:
        raise ValueError(f"vocab_size is {size}")
    return size


def _sealed(values: NDArray[Any]) -> NDArray[Any]:
    """A copy in memory that no flag makes writable: the core trusts the ids that were checked."""
    return np.ndarray(values.shape, values.dtype, values.tobytes())


def _restore_batch(
    cls: type[BatchedSparseDistributions], token_ids: Any, probs: Any, vocab_size: int
) -> BatchedSparseDistributions:
    for name, values, kind in (("token_ids", token_ids, "i"), ("probs", probs, "f")):
        if not (isinstance(values, np.ndarray) and values.ndim == 2 and values.dtype.kind == kind):
            raise ValueError(f"{name} must be a stored array of shape (N, k)")
    if token_ids.shape != probs.shape or not isinstance(vocab_size, int) or not 0 < vocab_size < 1 << 63:
        raise ValueError(f"arrays of {token_ids.shape} and {probs.shape}, vocab_size {vocab_size!r}")
    token_ids, probs = token_ids.copy(), probs.copy()  # what is checked is what is kept
    for row in range(token_ids.shape[0]):
        with errors_at(f"row {row}"):
            held = token_ids[row] != -1
            if (probs[row][~held] != 0.0).any():
                raise ValueError("padding (id -1) with a probability")
            restore(SparseDistribution, token_ids[row][held], probs[row][held], vocab_size)
    made = cls.__new__(cls)
    made._store(token_ids.astype(np.int64), probs.astype(np.float64), vocab_size)
    return made


@contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Say where an error happened: put `where` in front of its message, class and attributes kept.

    Errors of other classes than the package's own are the caller's; they get a note.
    """
    try:
        yield
    except Exception as error:
        located: Exception
        if type(error) is NonFiniteLogitsError:
            located = _restore_error(
                f"{where}: {error.message}", error.nan_count, error.inf_count, error.vocab_size
            )
        elif type(error) in (ValueError, IndexError, TypeError):
            located = type(error)(f"{where}: {error}")
        else:
            error.add_note(f"at {where}")
            raise
        raise located.with_traceback(error.__traceback__) from error.__cause__


register_python_types(
    SparseDistribution, BatchedSparseDistributions, NonFiniteLogitsError, non_finite_logits_error
)
