"""Rows: many distributions from many rows of logits, and a token from each, on the compiled core.

The functions of :mod:`mtplx.reference`, same names, errors and draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtplx._csampling.draws import Drawable
from mtplx.distributions import BatchedSparseDistributions, SamplerConfig, SparseDistribution, errors_at
from mtplx.reference.one_row import as_generator
from mtplx.reference.rows import as_rows, from_rows_of_logits, one_or_each, require_executor
from mtplx.sampling import distribution_from_logits, sample_from_distribution, sparse_distribution_from_logits
from mtplx.work import WORTHWHILE_LOGITS, run_ranges

__all__ = ["BatchedSparseDistributions", "distributions_from_logits", "sample_rows"]


def distributions_from_logits(
    logits: Any,
    config: SamplerConfig | Sequence[SamplerConfig],
    *,
    token_counts: Mapping[int, int] | Sequence[Mapping[int, int] | None] | None = None,
    penalty_overlay: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None,
    executor: Any = None,
) -> BatchedSparseDistributions | NDArray[np.float64]:
    """`distribution_from_logits` of every row.

    Parameters
    ----------
    logits : array_like of float, shape (N, V), or sequence of N rows
    config : SamplerConfig, or sequence of N
    token_counts, penalty_overlay : mapping, or sequence of N mappings (None: nothing), optional
        As in `apply_penalties`.
    executor : concurrent.futures.Executor, optional
        Runs contiguous ranges of rows on its workers; results never depend on it.

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
        run=lambda work, count, size: run_ranges(
            executor, work, count, least=1 + WORTHWHILE_LOGITS // max(size, 1)
        ),
    )


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
    rows = as_rows(distributions, "distributions")
    given = one_or_each(rngs, len(rows), "rngs")
    generators: list[Any] = []
    drawn: list[Callable[[Any], int]] = []
    for i in range(len(rows)):
        with errors_at(f"row {i}"):
            row = rows[i]
            generators.append(as_generator(given[i]))
            if isinstance(row, SparseDistribution):
                drawn.append(partial(sample_from_distribution, row))
            else:
                drawn.append(Drawable(row).draw)
    return np.array([draw(rng) for draw, rng in zip(drawn, generators, strict=True)], dtype=np.int64)
