"""Many rows, each looked at only when it is reached.

Design
------
`Lazy` is a sequence whose entries are made when they are first asked for. Rows, draft rows and token
ids of a block all come in that form, so that a rule that stops at a rejection has touched nothing
behind it, and a row from logits is computed once, however often a rule returns to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mtplx._csampling.dlpack import imported
from mtplx.distributions import (
    BatchedSparseDistributions,
    Distribution,
    SamplerConfig,
    SparseDistribution,
    errors_at,
)
from mtplx.reference.one_row import (
    Float64,
    as_array,
    as_generator,
    as_top_k,
    distribution_from_logits,
    draw,
    sparse_distribution_from_logits,
    weights_of,
)

Entry = TypeVar("Entry")
EntryOut = TypeVar("EntryOut", covariant=True)


class Indexed(Protocol[EntryOut]):
    """What can be asked for its length and its entries: a list, an array, or a `Lazy`."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> EntryOut: ...


class Lazy(Generic[Entry]):
    """A sequence whose entries are made when they are first asked for.

    Parameters
    ----------
    count : int
    make : callable
        Gives entry i; called at most once for each i.

    Examples
    --------
    >>> squares = Lazy(3, lambda i: print("made", i) or i * i)
    >>> squares[2] + squares[2]
    made 2
    8
    """

    def __init__(self, count: int, make: Callable[[int], Entry]) -> None:
        self._count = count
        self._make = make
        self._made: dict[int, Entry] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> Entry:
        if not 0 <= i < self._count:
            raise IndexError(f"entry {i} is outside [0, {self._count})")
        if i not in self._made:
            self._made[i] = self._make(i)
        return self._made[i]

    def first(self, count: int) -> Lazy[Entry]:
        """The first `count` entries."""
        return Lazy(count, self.__getitem__)


# ---- what comes in -------------------------------------------------------------------------------


def is_sequence(value: Any) -> bool:
    """Whether `value` holds entries by number. Texts and mappings do not."""
    return (
        hasattr(value, "__len__")
        and hasattr(value, "__getitem__")
        and not isinstance(value, str | bytes | Mapping)
    )


def is_array(value: Any) -> bool:
    """Whether NumPy can read `value` as the array that it is."""
    return isinstance(value, np.ndarray) or hasattr(value, "__array__") or hasattr(value, "__dlpack__")


def as_distribution(values: Any, name: str) -> Distribution:
    """One row as it will be used: a `SparseDistribution`, or a one-dimensional array of any real dtype."""
    if isinstance(values, SparseDistribution):
        return values
    row = as_array(values, name)
    if row.ndim != 1 or row.size == 0:
        raise ValueError(f"{name} must be one-dimensional and not empty, not of shape {row.shape}")
    return row


def vocabulary(distribution: Distribution) -> int:
    """V."""
    return distribution.vocab_size if isinstance(distribution, SparseDistribution) else distribution.size


def as_rows(rows: Any, name: str) -> Lazy[Any]:
    """Rows as they are given: those of a 2-D array, of a batch, or the entries of a sequence."""
    if isinstance(rows, BatchedSparseDistributions):
        return Lazy(len(rows), rows.to_distribution)
    if is_array(rows):
        array = imported(rows, name)
        if array.ndim != 2 and not (array.ndim == 1 and (array.size == 0 or array.dtype.kind == "O")):
            raise ValueError(f"{name} must be rows, of shape (N, V), not of shape {array.shape}")
        return Lazy(len(array), array.__getitem__)
    if isinstance(rows, SparseDistribution) or not is_sequence(rows):
        raise TypeError(f"{name} must be an array or a sequence of rows, not {type(rows).__name__}")
    return Lazy(len(rows), rows.__getitem__)


def as_distributions(rows: Any, name: str) -> Lazy[Distribution]:
    """Rows of probabilities, each opened when it is first asked for."""
    given = as_rows(rows, name)
    return Lazy(len(given), lambda i: as_distribution(given[i], name))


def one_or_each(value: Any, count: int, name: str) -> Indexed[Any]:
    """One value for all of `count`, or a sequence of as many."""
    if not is_sequence(value):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} rows or sequences")
    each: Indexed[Any] = value
    return each


# ---- from logits ---------------------------------------------------------------------------------


def row_from_logits(
    logits: Any,
    config: SamplerConfig,
    token_counts: Mapping[int, int] | None = None,
    penalty_overlay: Mapping[int, float] | None = None,
) -> Distribution:
    """One row of `distributions_from_logits`: sparse when top-k is on, else dense."""
    row = as_array(logits, "logits")
    make: Callable[..., Distribution] = (
        sparse_distribution_from_logits if as_top_k(config.top_k, row.size) else distribution_from_logits
    )
    return make(row, config, token_counts=token_counts, penalty_overlay=penalty_overlay)


def distributions_from_logits(
    logits: Any,
    config: SamplerConfig | Sequence[SamplerConfig],
    *,
    token_counts: Mapping[int, int] | Sequence[Mapping[int, int] | None] | None = None,
    penalty_overlay: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None,
    executor: Any = None,
) -> BatchedSparseDistributions | Float64:
    """`distribution_from_logits` of every row.

    Parameters
    ----------
    logits : array_like of float, shape (N, V), or sequence of N rows
    config : SamplerConfig, or sequence of N
    token_counts, penalty_overlay : mapping, or sequence of N mappings (None: nothing), optional
        As in `apply_penalties`.
    executor : concurrent.futures.Executor, optional
        For the compiled face; results never depend on it, and this one computes in the calling thread.

    Returns
    -------
    BatchedSparseDistributions
        Where top-k is on in every row: ids ascending, then padding; as wide as the largest top-k.
    ndarray of float64, shape (N, V)
        Otherwise.

    Raises
    ------
    NonFiniteLogitsError, ValueError, IndexError, TypeError
        As in `distribution_from_logits`; the message names the row. ValueError also where rows differ
        in length, where a sequence has not N entries, or where there is no row to tell V from.

    Examples
    --------
    >>> distributions_from_logits([[0.0, 0.0], [1.0, 0.0]], SamplerConfig(temperature=0, top_k=None))
    array([[1., 0.],
           [1., 0.]])
    >>> distributions_from_logits([[0.0, 1.0, 1.0]], SamplerConfig(top_k=2)).token_ids
    array([[1, 2]])
    """
    require_executor(executor)
    return from_rows_of_logits(
        logits,
        config,
        token_counts,
        penalty_overlay,
        dense=distribution_from_logits,
        sparse=sparse_distribution_from_logits,
        run=lambda work, count, size: work(0, count),
    )


def from_rows_of_logits(
    logits: Any,
    config: Any,
    token_counts: Any,
    penalty_overlay: Any,
    *,
    dense: Callable[..., Any],
    sparse: Callable[..., Any],
    run: Callable[[Callable[[int, int], None], int, int], None],
) -> BatchedSparseDistributions | Float64:
    """`distributions_from_logits` with the functions that make one row, of either face, and what runs them.

    `run` is given ``work``, the number of rows and V; it calls ``work(first, last)`` for ranges that cover
    all rows.
    """
    rows = as_rows(logits, "logits")
    count = len(rows)
    configs = one_or_each(config, count, "config")
    counts = one_or_each(token_counts, count, "token_counts")
    overlays = one_or_each(penalty_overlay, count, "penalty_overlay")
    if count == 0:
        return _no_rows(logits, config)
    with errors_at("row 0"):
        size = as_array(rows[0], "logits").size
    all_sparse = all(as_top_k(configs[i].top_k, size) for i in range(count))
    made: list[Any] = [None] * count if all_sparse else list(np.empty((count, size)))

    def work(first: int, last: int) -> None:
        for i in range(first, last):
            with errors_at(f"row {i}"):
                row = as_array(rows[i], "logits")
                if row.size != size:
                    raise ValueError(f"logits have {row.size} entries, those of row 0 {size}")
                penalties = {"token_counts": counts[i], "penalty_overlay": overlays[i]}
                if all_sparse:
                    made[i] = sparse(row, configs[i], **penalties)
                else:
                    dense(row, configs[i], **penalties, out=made[i])

    run(work, count, size)
    if not all_sparse:
        return np.asarray(made[0].base)
    width = max(as_top_k(configs[i].top_k, size) for i in range(count))
    return BatchedSparseDistributions.from_distributions(made, vocab_size=size, width=width)


def _no_rows(logits: Any, config: Any) -> BatchedSparseDistributions | Float64:
    shape = np.shape(logits)
    if len(shape) != 2 or shape[1] == 0:
        raise ValueError(f"logits of shape {shape} do not tell the vocabulary size")
    width = 0 if is_sequence(config) else as_top_k(config.top_k, shape[1])
    if width:
        return BatchedSparseDistributions(
            np.empty((0, width), int), np.empty((0, width)), vocab_size=shape[1]
        )
    return np.empty(shape)


def require_executor(executor: Any) -> None:
    """Refuse what cannot run work, here too, where none is given away."""
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise TypeError(f"executor must have a submit method; {type(executor).__name__} lacks it")
    if isinstance(executor, ProcessPoolExecutor):
        raise TypeError("executor must run in this process: its workers write to this process's memory")


# ---- draws ---------------------------------------------------------------------------------------


def sample_rows(distributions: Any, rngs: Any) -> NDArray[np.int64]:
    """Draw one token of every row, each as `sample_from_distribution` does.

    Parameters
    ----------
    distributions : array_like of float, shape (N, V), BatchedSparseDistributions, or sequence of N
    rngs : sequence of N generators, or one generator
        One generator serves all rows, in row order. None, alone or as an entry: a fresh generator.

    Returns
    -------
    ndarray of int64, shape (N,)

    Raises
    ------
    ValueError, TypeError
        As in `sample_from_distribution`, for any row, before the first number is drawn; the message names
        the row. ValueError also where `rngs` has not N entries.

    Examples
    --------
    >>> sample_rows([[0.0, 1.0], [1.0, 0.0]], np.random.default_rng(0))
    array([1, 0])
    """
    rows = as_distributions(distributions, "distributions")
    given = one_or_each(rngs, len(rows), "rngs")
    generators, weights = [], []
    for i in range(len(rows)):
        with errors_at(f"row {i}"):
            generators.append(as_generator(given[i]))
            weights.append(weights_of(rows[i], "probs"))
    return np.array([draw(rng, row) for rng, row in zip(generators, weights, strict=True)], dtype=np.int64)
