"""The drop-in: the functions of :mod:`mtplx.reference`, same names, errors and draws, on the compiled core.

This module needs nothing of the package but `mtplx.distributions` and `mtplx._csampling`. Where a wrapper
would do nothing, the public name is the core's function; what is written here takes a `SamplerConfig` apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtplx._csampling import truncation
from mtplx._csampling.acceptance import acceptance_probability, residual_distribution, verify_one_token
from mtplx._csampling.draws import sample_from_distribution
from mtplx._csampling.laws import distribution_entropy, speculative_output_marginal, total_variation
from mtplx._csampling.lossy import (
    cascade_defer_decision,
    cascade_token_deferral,
    cascade_token_target_distribution,
    typical_accept_decision,
    typical_acceptance_threshold,
)
from mtplx._csampling.penalties import PENALTY_MAX, PENALTY_MIN, apply_penalties
from mtplx._csampling.softmax import softmax
from mtplx._csampling.truncation import apply_top_k_top_p, apply_top_p_top_k, deterministic_top_k_order
from mtplx.distributions import (
    Distribution,
    NonFiniteLogitsError,
    SamplerConfig,
    SparseDistribution,
    SpeculativeDecision,
    non_finite_logits_error,
)

__all__ = [
    "PENALTY_MAX",
    "PENALTY_MIN",
    "Distribution",
    "NonFiniteLogitsError",
    "SamplerConfig",
    "SparseDistribution",
    "SpeculativeDecision",
    "acceptance_probability",
    "apply_penalties",
    "apply_top_k_top_p",
    "apply_top_p_top_k",
    "cascade_defer_decision",
    "cascade_token_deferral",
    "cascade_token_target_distribution",
    "deterministic_top_k_order",
    "distribution_entropy",
    "distribution_from_logits",
    "non_finite_logits_error",
    "residual_distribution",
    "sample_from_distribution",
    "softmax",
    "sparse_distribution_from_logits",
    "speculative_output_marginal",
    "total_variation",
    "typical_accept_decision",
    "typical_acceptance_threshold",
    "verify_one_token",
]


def distribution_from_logits(
    logits: Any,
    config: SamplerConfig,
    *,
    token_counts: Mapping[int, int] | None = None,
    penalty_overlay: Mapping[int, float] | None = None,
    out: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Penalties on the raw logits, softmax at the temperature, then top-p and top-k.

    Parameters
    ----------
    logits : array_like of float, shape (V,)
    config : SamplerConfig
        At temperature <= 0 the result is one-hot, whatever the truncation.
    token_counts, penalty_overlay : mapping, optional
        As in `apply_penalties`; applied without a copy of the row.
    out : ndarray of float64, shape (V,), optional

    Returns
    -------
    ndarray of float64, shape (V,)
        Keeps exactly what ``reference.apply_top_p_top_k(softmax(logits, T), ...)`` keeps.

    Raises
    ------
    NonFiniteLogitsError, ValueError, IndexError, TypeError
        As in `apply_penalties`, `softmax` and `apply_top_p_top_k`.

    Examples
    --------
    >>> distribution_from_logits([0.0, 1.0, 2.0], SamplerConfig(temperature=0))
    array([0., 0., 1.])
    """
    return truncation.distribution_from_logits(
        logits,
        config.temperature,
        config.top_p,
        config.top_k,
        config.presence_penalty,
        config.frequency_penalty,
        token_counts,
        penalty_overlay,
        out,
    )


def sparse_distribution_from_logits(
    logits: Any,
    config: SamplerConfig,
    *,
    token_counts: Mapping[int, int] | None = None,
    penalty_overlay: Mapping[int, float] | None = None,
) -> SparseDistribution:
    """`distribution_from_logits` as its support alone: ids ascending, entries of probability 0 left out.

    With top-k on, the row is streamed once and no array of V probabilities is written.

    Parameters
    ----------
    logits : array_like of float, shape (V,)
    config : SamplerConfig
    token_counts, penalty_overlay : mapping, optional

    Returns
    -------
    SparseDistribution

    Raises
    ------
    NonFiniteLogitsError, ValueError, IndexError, TypeError
        As in `distribution_from_logits`.

    Examples
    --------
    >>> d = sparse_distribution_from_logits([0.0, 1.0, 1.0], SamplerConfig(top_k=2))
    >>> d.token_ids, d.probs
    (array([1, 2]), array([0.5, 0.5]))
    """
    return truncation.sparse_distribution_from_logits(
        logits,
        config.temperature,
        config.top_p,
        config.top_k,
        config.presence_penalty,
        config.frequency_penalty,
        token_counts,
        penalty_overlay,
    )
