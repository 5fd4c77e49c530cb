"""One row: logits to a distribution, draws, the verification of one token, laws and distances.

Design
------
- One row is a one-dimensional, non-empty array of real numbers; `as_row` is the only way in.
- Sums that *decide* something (nucleus, categorical draw) are sequential, by `numpy.cumsum`.
  Sums that only normalise are as exact as they can be (`accurate_sum`).
- All checks come before the first draw, so an error leaves the generator as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mtplx._csampling.dlpack import imported, widen_bfloat16
from mtplx.arguments import as_integer, as_real
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
    "verify_one_token",
]

PENALTY_MIN = -2.0
PENALTY_MAX = 2.0

Float64 = NDArray[np.float64]
Weights = tuple[NDArray[np.int64] | None, Float64]
"""What a token is drawn from: ids (None: 0, 1, 2, ...) and their weights, in the order that a draw walks."""


# ---- what comes in -------------------------------------------------------------------------------


def as_array(values: Any, name: str) -> NDArray[Any]:
    """Any array_like of real numbers as a NumPy array of its own dtype, without a copy where possible."""
    array = widen_bfloat16(imported(values, name))
    custom = array.dtype.kind == "V" and array.dtype.names is None and array.dtype.type is not np.void
    if array.dtype.kind == "O":
        if not all(
            hasattr(value, "__float__") and not isinstance(value, np.complexfloating) for value in array.flat
        ):
            raise TypeError(f"{name} must hold real numbers, not objects")
        with np.errstate(all="ignore"):
            array = array.astype(np.float64)
    elif array.dtype.kind not in "biuf" and not custom:
        raise TypeError(f"{name} must hold real numbers, not {array.dtype}")
    return array


def as_row(values: Any, name: str) -> Float64:
    """One row as float64; a view of the caller's memory where it is float64 already, so never write to it."""
    array = as_array(values, name)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be one-dimensional and not empty, not of shape {array.shape}")
    with np.errstate(all="ignore"):  # a number beyond float64 is infinite
        return np.asarray(array, dtype=np.float64)


def as_probabilities(values: Any, name: str) -> Float64:
    """One row of weights: finite, not negative, and somewhere positive."""
    row = as_row(values, name)
    lowest, highest = float(row.min()), float(row.max())
    if not (lowest >= 0.0 and highest < np.inf):
        where = int(np.flatnonzero(~((row >= 0.0) & (row < np.inf)))[0])
        raise ValueError(f"{name} must be finite and not negative: entry {where} is {row[where]}")
    if highest == 0.0:
        raise ValueError(f"{name} has no positive mass")
    return row


def as_dense(distribution: Any, name: str) -> Float64:
    """A distribution of either kind as a dense row."""
    if isinstance(distribution, SparseDistribution):
        return distribution.to_dense()
    return as_row(distribution, name)


def as_result(out: Any, size: int, *inputs: Any, dtypes: tuple[Any, ...] = (np.float64,)) -> NDArray[Any]:
    """The array to write a result of `size` entries to: `out` after its checks, or a fresh one."""
    if out is None:
        return np.empty(size)
    if not isinstance(out, np.ndarray) or out.dtype not in dtypes or not out.dtype.isnative:
        found = out.dtype if isinstance(out, np.ndarray) else type(out).__name__
        raise ValueError(
            f"out must be an array of {' or '.join(np.dtype(d).name for d in dtypes)}, not {found}"
        )
    if out.shape != (size,):
        raise ValueError(f"out must have shape ({size},), not {out.shape}")
    if not out.flags.c_contiguous or not out.flags.writeable or not out.flags.aligned:
        raise ValueError("out must be C-contiguous, aligned and writable")
    for array in inputs:
        if isinstance(array, np.ndarray) and np.shares_memory(out, array):
            raise ValueError("out overlaps an input")
    return out


def as_temperature(temperature: Any) -> float:
    value = as_real(temperature, "temperature")
    if np.isnan(value):
        raise ValueError(f"temperature is {value}")
    return value


def as_top_p(top_p: Any) -> float:
    value = as_real(top_p, "top_p")
    if np.isnan(value):
        raise ValueError(f"top_p is {value}")
    return value


def as_top_k(top_k: Any, size: int) -> int:
    """The number of ranks to keep; 0 when top-k is off."""
    k = 0 if top_k is None else as_integer(top_k, "top_k")
    return k if 0 < k < size else 0


def accurate_sum(values: Float64) -> float:
    """Sum of finite values >= 0 to the last bit or nearly; inf where it overflows.

    A running sum of equal numbers drifts by several ulp. Here every value is cut at one bit position,
    chosen such that the sum of the upper parts is exact in any order; of the lower parts, which are
    smaller than the last bit of the largest value, rounding may take what it likes (S. Rump,
    "Ultimately fast accurate summation", SIAM J. Sci. Comput. 31, 2009).
    """
    _, exponent = math.frexp(float(values.max()))
    if exponent > 900:  # the cut would overflow; what the scaling rounds is far below the last bit
        return accurate_sum(values * 2.0**-200) * 2.0**200
    cut = math.ldexp(1.5, exponent + values.size.bit_length())
    upper = (values + cut) - cut
    return float(upper.sum() + (values - upper).sum())


def normalised(weights: Float64) -> Float64:
    """`weights` divided by their sum; scaled by a power of two first where the sum overflows."""
    total = accurate_sum(weights)
    if np.isinf(total):
        weights = weights * 2.0**-64
        total = accurate_sum(weights)
    return np.asarray(weights / total)


# ---- from logits to a distribution ---------------------------------------------------------------


@np.errstate(all="ignore")
def softmax(logits: ArrayLike, temperature: float = 1.0, *, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """``exp(z) / sum exp(z)`` with ``z = x/T - max(x/T)``.

    Where ``x/T`` overflows, ``z = (x - max x)/T``, so that finite logits always give a distribution.

    Parameters
    ----------
    logits : array_like of float, shape (V,)
        Entries of -inf get probability 0.
    temperature : float
        T. Zero or less: one-hot at the largest logit, the lowest id among equals. inf: uniform over
        the entries above -inf.
    out : ndarray of float64 or float32, shape (V,), optional
        C-contiguous and writable; receives the result and is returned.

    Returns
    -------
    ndarray of float64, shape (V,)
        Or `out`.

    Raises
    ------
    NonFiniteLogitsError
        A logit is NaN or +inf, or none is above -inf; at T <= 0 too.
    ValueError
        `temperature` is NaN; `logits` is not one-dimensional or is empty; `out` does not fit.
    TypeError
        `logits` does not hold real numbers.

    Examples
    --------
    >>> softmax([0.0, 0.0, float("-inf")])
    array([0.5, 0.5, 0. ])
    """
    x = as_row(logits, "logits")
    t = as_temperature(temperature)
    result = as_result(out, x.size, logits, x, dtypes=(np.float64, np.float32))
    largest = x.max()
    if not np.isfinite(largest):
        raise non_finite_logits_error(x, "softmax")
    if t <= 0.0:
        result[:] = 0.0
        result[int(x.argmax())] = 1.0
        return result
    if np.isinf(t):
        allowed = x > -np.inf
        result[:] = allowed / np.count_nonzero(allowed)
        return result
    with np.errstate(all="ignore"):
        top = largest / t  # = max(x/T): division rounds monotonically
        z = np.subtract(x / t, top) if np.isfinite(top) else (x - largest) / t
        weights = np.exp(z, out=z)
        result[:] = np.divide(weights, accurate_sum(weights), out=weights)
    return result


def deterministic_top_k_order(values: ArrayLike, top_k: int) -> NDArray[np.int64]:
    """Ids of the `top_k` largest values: by value descending, equal values by ascending id.

    The rule holds at the cut too: of values that tie there, the lowest ids are in. NaN ranks last.

    Parameters
    ----------
    values : array_like of float, shape (V,)
    top_k : int
        Zero or less: nothing.

    Returns
    -------
    ndarray of int64, shape (min(top_k, V),)

    Raises
    ------
    ValueError
        `values` is not one-dimensional or is empty.

    Examples
    --------
    >>> deterministic_top_k_order([0.1, 0.3, 0.3, 0.2], 2)
    array([1, 2])
    """
    row = as_row(values, "values")
    k = min(max(as_integer(top_k, "top_k"), 0), row.size)
    if k == 0:
        return np.empty(0, dtype=np.int64)
    if np.isnan(row.max()):
        numbers = np.flatnonzero(~np.isnan(row))
        ranked = numbers[_ranking(row[numbers], min(k, numbers.size))]
        return np.concatenate([ranked, np.flatnonzero(np.isnan(row))])[:k]
    return _ranking(row, k)


def _ranking(row: Float64, k: int) -> NDArray[np.int64]:
    """The first `k` ranks of a row without NaN."""
    if k == row.size:
        return np.argsort(-row, kind="stable")
    if k == 0:
        return np.empty(0, dtype=np.int64)
    cut = np.partition(row, row.size - k)[row.size - k]
    above = np.flatnonzero(row > cut)
    above = above[np.argsort(-row[above], kind="stable")]
    level = np.flatnonzero(row == cut)
    return np.concatenate([above, level[: k - above.size]])


@np.errstate(all="ignore")
def apply_top_p_top_k(
    probs: ArrayLike, top_p: float = 1.0, top_k: int | None = 0, *, out: Float64 | None = None
) -> Float64:
    """Keep the nucleus and the first `top_k` ranks, and divide by what is kept.

    Tokens are ranked by (probability descending, id ascending). Rank i is kept if it is among the
    first `top_k` **and** the mass ranked before it is below `top_p`. That mass is summed in rank
    order over the probabilities as given: the nucleus is measured on the whole distribution, also
    when top-k is on. The token that crosses `top_p` is kept, the first rank always.

    Parameters
    ----------
    probs : array_like of float, shape (V,)
        Need not sum to 1.
    top_p : float
        Outside (0, 1): off.
    top_k : int or None
        None, zero or less, V or more: off.
    out : ndarray of float64, shape (V,), optional

    Returns
    -------
    ndarray of float64, shape (V,)

    Raises
    ------
    ValueError
        A probability is negative or not finite, none is positive; `top_p` is NaN; `out` does not fit.

    References
    ----------
    Holtzman et al., "The curious case of neural text degeneration" (arXiv:1904.09751).

    Examples
    --------
    >>> apply_top_p_top_k([0.5, 0.25, 0.125, 0.125], top_p=0.75)
    array([0.66666667, 0.33333333, 0.        , 0.        ])
    """
    p = as_probabilities(probs, "probs")
    threshold = as_top_p(top_p)
    k = as_top_k(top_k, p.size)
    result = as_result(out, p.size, probs, p)
    nucleus = 0.0 < threshold < 1.0
    if not nucleus and k == 0:
        result[:] = normalised(p)
        return result
    kept = _ranking(p, k or p.size)
    if nucleus:
        with np.errstate(over="ignore"):
            mass_up_to = np.cumsum(p[kept])
        # Rank 0 has nothing before it; rank i is kept while the sum up to rank i - 1 is below top_p.
        kept = kept[: 1 + int(np.searchsorted(mass_up_to[:-1], threshold, side="left"))]
    result[:] = 0.0
    result[kept] = normalised(p[kept])
    return result


def apply_top_k_top_p(
    probs: ArrayLike, top_k: int | None = 0, top_p: float = 1.0, *, out: Float64 | None = None
) -> Float64:
    """`apply_top_p_top_k` with its two settings in the other order.

    Parameters
    ----------
    probs : array_like of float, shape (V,)
    top_k : int or None
    top_p : float
    out : ndarray of float64, shape (V,), optional
        All as in `apply_top_p_top_k`.

    Returns
    -------
    ndarray of float64, shape (V,)

    Raises
    ------
    ValueError
        As in `apply_top_p_top_k`.

    Examples
    --------
    >>> apply_top_k_top_p([0.5, 0.25, 0.25], 2)
    array([0.66666667, 0.33333333, 0.        ])
    """
    return apply_top_p_top_k(probs, top_p, top_k, out=out)


def apply_penalties(
    logits: Any,
    token_counts: Mapping[int, int] | None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    penalty_overlay: Mapping[int, float] | None = None,
) -> Any:
    """Lower the logits of tokens that were seen, then subtract an overlay.

    ``logit[j] -= frequency * count[j] + presence * (count[j] > 0)``, both penalties clamped to
    [-2, 2]; then ``logit[j] -= overlay[j]``, unclamped: a negative entry raises, +inf bans.

    Parameters
    ----------
    logits : array_like of float, shape (V,)
    token_counts : mapping of int to int, or None
        Occurrences by token id.
    presence_penalty, frequency_penalty : float
    penalty_overlay : mapping of int to float, or None

    Returns
    -------
    ndarray of float64, shape (V,)
        A fresh copy; where there is nothing to do (no counts or both penalties 0, and no overlay),
        the very object passed in.

    Raises
    ------
    IndexError
        An id outside [0, V).
    ValueError
        A penalty or an overlay is NaN; a count is negative or NaN.
    TypeError
        `token_counts` or `penalty_overlay` is not a mapping, or an id is not an integer.

    Examples
    --------
    >>> apply_penalties([2.0, 2.0, 2.0], {0: 3, 1: 1}, 0.5, 0.25)
    array([0.75, 1.25, 2.  ])
    """
    presence = _clamped(presence_penalty, "presence_penalty")
    frequency = _clamped(frequency_penalty, "frequency_penalty")
    for mapping, name in ((token_counts, "token_counts"), (penalty_overlay, "penalty_overlay")):
        if mapping is not None and not isinstance(mapping, Mapping):
            raise TypeError(f"{name} must be a mapping of token ids, not {type(mapping).__name__}")
    counts = token_counts if token_counts and (presence or frequency) else {}
    overlay = penalty_overlay or {}
    if not counts and not overlay:
        return logits
    occurrences_of = [
        (as_integer(token, "a token id"), as_real(count, f"token_counts of token {token}"), count)
        for token, count in counts.items()
    ]
    amounts = [
        (as_integer(token, "a token id"), as_real(amount, f"penalty_overlay of token {token}"), amount)
        for token, amount in overlay.items()
    ]
    penalised = as_row(logits, "logits").copy()
    with np.errstate(all="ignore"):
        for token, occurrences, count in occurrences_of:
            if not occurrences >= 0.0:
                raise ValueError(f"token {token} has the count {count}")
            penalised[id_within(token, penalised.size)] -= frequency * occurrences + presence * (
                occurrences > 0
            )
        for token, value, amount in amounts:
            if np.isnan(value):
                raise ValueError(f"penalty_overlay of token {token} is {amount}")
            penalised[id_within(token, penalised.size)] -= value
    return penalised


def _clamped(penalty: float, name: str) -> float:
    value = as_real(penalty, name)
    if np.isnan(value):
        raise ValueError(f"{name} is {value}")
    return min(max(value, PENALTY_MIN), PENALTY_MAX)


def check_settings(config: SamplerConfig) -> None:
    """Raise what the settings of a truncation would raise at a row of logits."""
    as_temperature(config.temperature)
    as_top_p(config.top_p)
    as_top_k(config.top_k, 0)


def check_penalties(config: SamplerConfig) -> None:
    """The same of penalties."""
    _clamped(config.presence_penalty, "presence_penalty")
    _clamped(config.frequency_penalty, "frequency_penalty")


def id_within(token_id: Any, size: int) -> int:
    token = as_integer(token_id, "a token id")
    if not 0 <= token < size:
        raise IndexError(f"token id {token} is outside [0, {size})")
    return token


def distribution_from_logits(
    logits: Any,
    config: SamplerConfig,
    *,
    token_counts: Mapping[int, int] | None = None,
    penalty_overlay: Mapping[int, float] | None = None,
    out: Float64 | None = None,
) -> Float64:
    """Penalties on the raw logits, softmax at the temperature, then top-p and top-k.

    Parameters
    ----------
    logits : array_like of float, shape (V,)
    config : SamplerConfig
        At temperature <= 0 the result is one-hot, whatever the truncation.
    token_counts, penalty_overlay : mapping, optional
        As in `apply_penalties`.
    out : ndarray of float64, shape (V,), optional

    Returns
    -------
    ndarray of float64, shape (V,)

    Raises
    ------
    NonFiniteLogitsError, ValueError, IndexError, TypeError
        As in `apply_penalties`, `softmax` and `apply_top_p_top_k`.

    Examples
    --------
    >>> distribution_from_logits([0.0, 1.0, 2.0], SamplerConfig(temperature=0))
    array([0., 0., 1.])
    """
    penalised = apply_penalties(
        logits, token_counts, config.presence_penalty, config.frequency_penalty, penalty_overlay
    )
    x = as_row(penalised, "logits")
    temperature, top_p = as_temperature(config.temperature), as_top_p(config.top_p)
    as_result(out, x.size, logits, x)
    nucleus = 0.0 < top_p < 1.0
    if temperature <= 0.0 or not (nucleus or as_top_k(config.top_k, x.size)):
        return softmax(x, temperature, out=out)
    return apply_top_p_top_k(softmax(x, temperature), top_p, config.top_k, out=out)


def sparse_distribution_from_logits(
    logits: Any,
    config: SamplerConfig,
    *,
    token_counts: Mapping[int, int] | None = None,
    penalty_overlay: Mapping[int, float] | None = None,
) -> SparseDistribution:
    """`distribution_from_logits` as its support alone: ids ascending, entries of probability 0 left out.

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
    dense = distribution_from_logits(
        logits, config, token_counts=token_counts, penalty_overlay=penalty_overlay
    )
    ids = np.flatnonzero(dense)
    return SparseDistribution(ids, dense[ids], dense.size)


# ---- acceptance and correction -------------------------------------------------------------------


def probability_of(distribution: Any, token: int, name: str) -> float:
    """The one number that acceptance needs of a row; nothing else of the row is looked at."""
    if isinstance(distribution, SparseDistribution):
        return distribution.probability(token)
    row = as_array(distribution, name)
    if row.ndim != 1 or row.size == 0:
        raise ValueError(f"{name} must be one-dimensional and not empty, not of shape {row.shape}")
    probability = float(row[id_within(token, row.size)])
    if not 0.0 <= probability < np.inf:
        raise ValueError(f"{name} must be finite and not negative: entry {token} is {probability}")
    return probability


def acceptance_probability(target_p: Any, draft_q: Any, token_id: int) -> float:
    """``min(1, p(x)/q(x))``: how likely the drafted token x is kept.

    With ``q(x) = 0`` it is 1.0 if ``p(x) > 0`` and else 0.0.

    Parameters
    ----------
    target_p, draft_q : array_like of float, shape (V,), or SparseDistribution
    token_id : int
        The drafted token x.

    Returns
    -------
    float

    Raises
    ------
    IndexError
        `token_id` outside [0, V) of a dense row (a sparse one has 0.0 there).
    ValueError
        p(x) or q(x) is negative or not finite. No other entry is read.

    References
    ----------
    Leviathan et al. (arXiv:2211.17192); Chen et al. (arXiv:2302.01318).

    Examples
    --------
    >>> acceptance_probability([0.1, 0.9], [0.8, 0.2], 0)
    0.125
    """
    token = as_integer(token_id, "a token id")
    p = probability_of(target_p, token, "target_p")
    q = probability_of(draft_q, token, "draft_q")
    if q == 0.0:
        return 1.0 if p > 0.0 else 0.0
    with np.errstate(all="ignore"):
        return min(1.0, float(np.float64(p) / q))


def _positive_part(row: Float64) -> tuple[Float64, bool]:
    """The entries that are positive and finite, 0 in place of all others, and whether there are any."""
    kept = np.maximum(row, 0.0)  # NaN stays NaN
    if not np.isfinite(kept.max()):
        kept[~np.isfinite(kept)] = 0.0
    return kept, bool(kept.max() > 0.0)


def positive_differences(target_p: Any, draft_q: Any, scale: float = 1.0) -> tuple[Weights, bool]:
    """``(scale p - q)+`` by ascending id, undivided, and whether any of it is positive.

    `scale` is 1 but for the block rule, where it is the acceptance probability of the prefix.
    """
    ids, p, q = aligned(target_p, draft_q)
    with np.errstate(all="ignore"):
        weights, positive = _positive_part(p - q if scale == 1.0 else scale * p - q)
    if ids is None:
        return (None, weights), positive
    support = weights > 0.0
    return (ids[support], weights[support]), positive


def aligned(target_p: Any, draft_q: Any) -> tuple[NDArray[np.int64] | None, Float64, Float64]:
    """p and q side by side: over the target's support by ascending id if both are sparse, else over V."""
    if isinstance(target_p, SparseDistribution) and isinstance(draft_q, SparseDistribution):
        order = np.argsort(target_p.token_ids, kind="stable")
        ids = target_p.token_ids[order]
        by_id = np.argsort(draft_q.token_ids, kind="stable")
        place = np.searchsorted(draft_q.token_ids[by_id], ids)
        place = by_id[np.minimum(place, by_id.size - 1)]
        q = np.where(draft_q.token_ids[place] == ids, draft_q.probs[place], 0.0)
        return ids, target_p.probs[order], q
    p = as_dense(target_p, "target_p")
    q = as_dense(draft_q, "draft_q")
    if p.size != q.size:
        raise ValueError(f"target_p has {p.size} entries, draft_q {q.size}")
    return None, p, q


def correction_weights(target_p: Any, draft_q: Any, scale: float = 1.0) -> tuple[Weights, bool]:
    """`positive_differences`, or the target's own weights by ascending id where none is positive."""
    weights, positive = positive_differences(target_p, draft_q, scale)
    if not positive:
        # Dense where the differences were dense, so that the kind of a result hangs on the inputs alone.
        weights = positive_weights(as_dense(target_p, "target_p") if weights[0] is None else target_p)
    return weights, positive


def positive_weights(target_p: Any) -> Weights:
    """The positive entries of a row by ascending id; what is not finite or is negative counts as 0."""
    if isinstance(target_p, SparseDistribution):
        support = np.flatnonzero(target_p.probs)
        support = support[np.argsort(target_p.token_ids[support], kind="stable")]
        return target_p.token_ids[support], target_p.probs[support]
    weights, any_mass = _positive_part(as_row(target_p, "target_p"))
    if not any_mass:
        raise ValueError("neither the residual nor target_p has positive mass")
    return None, weights


@np.errstate(all="ignore")
def residual_distribution(target_p: Any, draft_q: Any, *, out: Float64 | None = None) -> Distribution:
    """``norm((p - q)+)``: what a rejected draft is replaced from.

    The inputs need not sum to 1 and are not normalised first. Entries whose difference is not finite
    count as 0. Where no difference is positive the result is the target.

    Parameters
    ----------
    target_p, draft_q : array_like of float, shape (V,), or SparseDistribution
        Dense lengths must agree; two sparse ones may differ in vocab_size.
    out : ndarray of float64, shape (V,), optional
        For a dense result.

    Returns
    -------
    ndarray of float64, shape (V,), or SparseDistribution
        Sparse if both are: ids ascending, no zero entries, the target's vocab_size; **the target
        object itself** if no difference is positive.

    Raises
    ------
    ValueError
        Lengths differ; neither the differences nor the target have positive mass; `out` does not fit.

    References
    ----------
    Leviathan et al. (arXiv:2211.17192), section 2.3.

    Examples
    --------
    >>> residual_distribution([0.1, 0.5, 0.4], [0.7, 0.2, 0.1])
    array([0. , 0.5, 0.5])
    """
    (ids, weights), positive = correction_weights(target_p, draft_q)
    if ids is not None:
        if out is not None:
            raise ValueError("out is for a dense result, and both distributions are sparse")
        return SparseDistribution(ids, weights, target_p.vocab_size) if positive else target_p
    rows = (imported(d, "distribution") for d in (target_p, draft_q) if not isinstance(d, SparseDistribution))
    result = as_result(out, weights.size, *rows)
    result[:] = normalised(weights)
    return result


# ---- draws ---------------------------------------------------------------------------------------


def as_generator(rng: Any) -> Any:
    """`rng`, or a fresh generator in place of None; what cannot draw is refused before anything is drawn."""
    if rng is None:
        return np.random.default_rng()
    for method in ("random", "choice"):
        if not callable(getattr(rng, method, None)):
            raise TypeError(f"rng must have random and choice methods; {type(rng).__name__} lacks {method}")
    return rng


def weights_of(distribution: Any, name: str) -> Weights:
    """The ids and weights of a distribution in storage order, checked."""
    if isinstance(distribution, SparseDistribution):
        return distribution.token_ids, distribution.probs
    return None, as_probabilities(distribution, name)


def draw(rng: Any, weights: Weights) -> int:
    """One categorical draw, from weights that were checked before."""
    if type(rng) is np.random.Generator:
        return token_at(weights, rng.random())
    ids, values = weights
    return int(rng.choice(np.arange(values.size) if ids is None else ids, p=normalised(values)))


def token_at(weights_by_id: Weights, u: float) -> int:
    """The first token whose cumulative weight, divided by the last one, exceeds `u`."""
    ids, weights = weights_by_id
    with np.errstate(over="ignore"):
        cumulative = np.cumsum(weights)
    if np.isinf(cumulative[-1]):
        cumulative = np.cumsum(weights * 2.0**-64)
    cumulative /= cumulative[-1]
    place = int(np.searchsorted(cumulative, u, side="right"))
    return place if ids is None else int(ids[place])


@np.errstate(all="ignore")
def sample_from_distribution(probs: Any, rng: Any = None) -> int:
    """Draw one token.

    One ``rng.random()`` gives u; the token is the first, in storage order, whose sequential
    cumulative weight divided by the total exceeds u. Weights are taken as given.

    Parameters
    ----------
    probs : array_like of float, shape (V,), or SparseDistribution
        Need not sum to 1.
    rng : numpy.random.Generator, or any object with ``random()`` and ``choice(ids, p=...)``, optional
        None: a fresh ``numpy.random.default_rng()``. An object other than a plain `Generator` is
        drawn from through its ``choice``.

    Returns
    -------
    int
        Never a token of probability 0.

    Raises
    ------
    ValueError
        A probability is negative or not finite, or none is positive.
    TypeError
        `rng` has not the two methods.

    Examples
    --------
    >>> sample_from_distribution([0.0, 1.0])
    1
    """
    weights = weights_of(probs, "probs")
    return draw(as_generator(rng), weights)


@np.errstate(all="ignore")
def verify_one_token(target_p: Any, draft_q: Any, draft_token: int, rng: Any = None) -> SpeculativeDecision:
    """Keep the drafted token, or replace it such that the emitted law is exactly the target's.

    One ``rng.random()`` gives u; the draft is accepted iff ``u <= a`` and ``a > 0`` with
    ``a = min(1, p(x)/q(x))``. On rejection one more number draws the correction from the differences
    ``(p - q)+`` as they are (from the target where none is positive), in ascending id order.

    Parameters
    ----------
    target_p, draft_q : array_like of float, shape (V,), or SparseDistribution
    draft_token : int
        The token that was drawn from `draft_q`.
    rng : numpy.random.Generator, or any object with ``random()`` and ``choice(ids, p=...)``, optional

    Returns
    -------
    SpeculativeDecision

    Raises
    ------
    ValueError, IndexError, TypeError
        As in `acceptance_probability`, `residual_distribution` and `sample_from_distribution`;
        always before a number is drawn.

    References
    ----------
    Leviathan et al. (arXiv:2211.17192); Chen et al. (arXiv:2302.01318).

    Examples
    --------
    >>> verify_one_token([0.0, 1.0], [1.0, 0.0], 0)
    SpeculativeDecision(accepted=False, token_id=1, accept_probability=0.0)
    """
    token = as_integer(draft_token, "a token id")
    accept_probability = acceptance_probability(target_p, draft_q, token)
    require_same_length(target_p, draft_q)
    generator = as_generator(rng)
    if accept_probability == 0.0:
        # Rejected whatever the coin shows: what can fail, fails before the coin. With p(x) > 0 the
        # target itself has mass, and nothing can.
        correction_weights(target_p, draft_q)
    # One hold of the lock for both numbers, so that another thread cannot draw between them.
    with generator.bit_generator.lock if type(generator) is np.random.Generator else nullcontext():
        u = float(generator.random())
        if u <= accept_probability and accept_probability > 0.0:
            return SpeculativeDecision(True, token, accept_probability)
        weights, _ = correction_weights(target_p, draft_q)
        return SpeculativeDecision(False, draw(generator, weights), accept_probability)


def require_same_length(target_p: Any, draft_q: Any) -> None:
    if isinstance(target_p, SparseDistribution) and isinstance(draft_q, SparseDistribution):
        return
    sizes = [
        d.vocab_size if isinstance(d, SparseDistribution) else as_array(d, "distribution").size
        for d in (target_p, draft_q)
    ]
    if sizes[0] != sizes[1]:
        raise ValueError(f"target_p has {sizes[0]} entries, draft_q {sizes[1]}")


# ---- laws and distances --------------------------------------------------------------------------


def _checked(distribution: Any, name: str) -> Distribution:
    """A distribution whose entries are known to be finite, not negative and somewhere positive."""
    return (
        distribution if isinstance(distribution, SparseDistribution) else as_probabilities(distribution, name)
    )


@np.errstate(all="ignore")
def speculative_output_marginal(target_p: Any, draft_q: Any) -> Float64:
    """The exact law of the token that one verification emits, the draft being drawn from `draft_q`.

    ``min(p, q) + (1 - sum min(p, q)) * residual``, both inputs normalised first. It equals the
    target; draws nothing.

    Parameters
    ----------
    target_p, draft_q : array_like of float, shape (V,), or SparseDistribution

    Returns
    -------
    ndarray of float64, shape (V,)

    Raises
    ------
    ValueError
        A probability is negative or not finite, a row has no mass, lengths differ.

    Examples
    --------
    >>> speculative_output_marginal([0.5, 0.5], [1.0, 0.0])
    array([0.5, 0.5])
    """
    target, draft = _checked(target_p, "target_p"), _checked(draft_q, "draft_q")
    require_same_length(target, draft)
    p = normalised(as_dense(target, "target_p"))
    q = as_dense(draft, "draft_q")
    if isinstance(draft, SparseDistribution):
        # Already normalised; ids beyond the target's vocabulary carry draft mass that is always rejected.
        q = np.concatenate([q, np.zeros(max(p.size - q.size, 0))])[: p.size]
    else:
        q = normalised(q)
    shared = np.minimum(p, q)
    residual = np.maximum(p - q, 0.0)
    mass = residual.sum()
    return np.asarray(shared + (1.0 - shared.sum()) * (residual / mass if mass > 0.0 else p))


@np.errstate(all="ignore")
def total_variation(p: Any, q: Any) -> float:
    """``sum (p - q)+``: the distance in total variation of two distributions.

    Parameters
    ----------
    p, q : array_like of float, shape (V,), or SparseDistribution

    Returns
    -------
    float

    Raises
    ------
    ValueError
        A probability is negative or not finite, a row has no mass, lengths differ.

    Examples
    --------
    >>> total_variation([0.5, 0.5], [1.0, 0.0])
    0.5
    """
    (_, differences), positive = positive_differences(_checked(p, "p"), _checked(q, "q"))
    return float(differences.sum()) if positive else 0.0


@np.errstate(all="ignore")
def distribution_entropy(distribution: Any) -> float:
    """Shannon entropy in nats, over the positive entries, after normalisation.

    Parameters
    ----------
    distribution : array_like of float, shape (V,), or SparseDistribution

    Returns
    -------
    float

    Raises
    ------
    ValueError
        A probability is negative or not finite, or none is positive.

    Examples
    --------
    >>> round(distribution_entropy([0.0, 2.0, 2.0]), 6)
    0.693147
    """
    weights = (
        distribution.probs
        if isinstance(distribution, SparseDistribution)
        else as_probabilities(distribution, "distribution")
    )
    p = normalised(weights)
    p = p[p > 0.0]
    return float(-(p * np.log(p)).sum()) + 0.0
