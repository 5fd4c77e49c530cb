"""Helper functions of the two rules that are not lossless: typical acceptance and speculative cascades.

Decisions are the reference's: where an entropy or a distance taken in another order than its own leaves a
doubt, it is taken as it is defined.
"""

import math

import numpy as np

cimport numpy as cnp
from libc.math cimport INFINITY, fabs

from mtplx._csampling.acceptance cimport one_probability, require_same_length
from mtplx._csampling.arrays cimport Row, doubles, integer, new_doubles, open_row, real
from mtplx._csampling.blocks cimport BY_DRAFT, DEFERRALS, deferral, deferral_bound
from mtplx._csampling.dispatch cimport CASCADE_DISTANCE, TYPICAL_THRESHOLD, count_fallback
from mtplx._csampling.distributions cimport (
    SparseDistributionBase,
    adopt,
    ascending_copy,
    dense_array,
    normalise,
    require_support,
)
from mtplx._csampling.laws cimport ENTROPY_ERROR, distance_as_defined, entropy_as_defined, open_law
from mtplx._csampling.mass cimport widen_into

from mtplx._csampling.laws import distribution_entropy, total_variation

cnp.import_array()

cdef double DISTANCE_ERROR = 2e-12  # of a distance, relative to its size or to 1


# ---- typical ---------------------------------------------------------------------------------------


def typical_acceptance_threshold(entropy_value, eps, delta):
    """``min(eps, delta * exp(-H))``: what typical acceptance asks of a token's probability.

    Parameters
    ----------
    entropy_value : float
        H, the entropy of the target's row in nats.
    eps, delta : float
        As in `Typical`.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        An argument is negative or NaN.

    References
    ----------
    T. Cai et al., "Medusa" (arXiv:2401.10774), section 2.3.

    Examples
    --------
    >>> typical_acceptance_threshold(0.0, 0.3, 0.09), typical_acceptance_threshold(0.0, 0.3, 0.9)
    (0.09, 0.3)
    """
    for name, value in (("eps", eps), ("delta", delta)):
        if not real(value, name) >= 0.0:
            raise ValueError(f"{name} must not be negative; it is {value!r}")
    entropy = real(entropy_value, "entropy_value")
    if not entropy >= 0.0:
        raise ValueError(f"entropy_value must be at least 0; it is {entropy}")
    return min(float(eps), float(delta) * math.exp(-entropy))


def typical_accept_decision(target_p, token_id, *, eps, delta, entropy_value=None):
    """Whether typical acceptance keeps a token: ``p(x) > min(eps, delta * exp(-H(p)))``.

    Parameters
    ----------
    target_p : array_like of float, shape (V,), or SparseDistribution
        p(x) is taken as given, H after normalisation.
    token_id : int
    eps, delta : float
        As in `Typical`.
    entropy_value : float, optional
        H(p) where it is known already.

    Returns
    -------
    accepted : bool
    threshold : float
    entropy : float

    Raises
    ------
    ValueError, IndexError
        As in `distribution_entropy`, `acceptance_probability` and `typical_acceptance_threshold`.

    Examples
    --------
    >>> typical_accept_decision([1.0, 0.0], 0, eps=0.3, delta=0.09)
    (True, 0.09, 0.0)
    """
    cdef double total
    cdef double p = one_probability(target_p, integer(token_id, "a token id"), "target_p")
    if entropy_value is None:
        entropy = distribution_entropy(target_p)
    else:
        entropy = real(entropy_value, "entropy_value")
    threshold = typical_acceptance_threshold(entropy, eps, delta)
    if entropy_value is None:
        # No entropy of the reference is below 0.
        low, high = (typical_acceptance_threshold(max(entropy + error, 0.0), eps, delta) * scale
                     for error, scale in ((ENTROPY_ERROR, 1.0 - 2.0 ** -50),
                                          (-ENTROPY_ERROR, 1.0 + 2.0 ** -50)))
        if (p > low) != (p > high):
            count_fallback(TYPICAL_THRESHOLD)
            if isinstance(target_p, SparseDistributionBase):
                weights = target_p.probs
            else:
                weights = open_law(target_p, "distribution", &total, False)
            entropy = entropy_as_defined(doubles(weights), len(weights))
            threshold = typical_acceptance_threshold(entropy, eps, delta)
    return p > threshold, threshold, entropy


# ---- cascade ---------------------------------------------------------------------------------------


cdef double tolerance_of(object alpha) except? -1.0:
    cdef double tolerance = real(alpha, "alpha")
    if tolerance != tolerance:
        raise ValueError(f"alpha is {alpha!r}")
    return tolerance


cdef deferral deferral_of(object rule) except *:
    if rule not in DEFERRALS:
        raise ValueError(f"unknown cascade rule {rule!r}; known are {', '.join(map(repr, DEFERRALS))}")
    return DEFERRALS[rule]


cdef double largest(object distribution, str name) except -1.0:
    cdef double total
    if isinstance(distribution, SparseDistributionBase):
        return float(require_support(distribution).probs.max())
    return float(open_law(distribution, name, &total, False).max())


def cascade_defer_decision(p, q, *, alpha, tv_value=None):
    """Whether a whole row is deferred to the target: ``max q < max p - alpha * TV(p, q)``.

    Parameters
    ----------
    p, q : array_like of float, shape (V,), or SparseDistribution
        Target and draft.
    alpha : float
    tv_value : float, optional
        The total variation of p and q where it is known already.

    Returns
    -------
    defer : bool
    tv : float

    Raises
    ------
    ValueError
        `alpha` or `tv_value` is NaN; as in `total_variation`.

    References
    ----------
    H. Narasimhan et al. (arXiv:2405.19261).

    Examples
    --------
    >>> cascade_defer_decision([0.75, 0.25], [0.5, 0.5], alpha=0.5)
    (True, 0.25)
    """
    cdef double tolerance = tolerance_of(alpha), distance, top, draft_top, doubt
    distance = total_variation(p, q) if tv_value is None else real(tv_value, "tv_value")
    if math.isnan(distance):
        raise ValueError(f"tv_value is {distance}")
    draft_top = largest(q, "q")
    top = largest(p, "p")
    if tv_value is None:
        doubt = fabs(tolerance) * DISTANCE_ERROR * max(1.0, distance)
        doubt += 2.0 ** -51 * (top + fabs(tolerance) * distance)
        if not fabs(draft_top - (top - tolerance * distance)) > doubt:
            count_fallback(CASCADE_DISTANCE)
            distance = distance_as_defined(p, q)
    return draft_top < top - tolerance * distance, distance


def cascade_token_deferral(p, q, token_id, *, alpha, rule):
    """r(x): whether a drafted token is left to the target, by one of the token rules of `Cascade`.

    Parameters
    ----------
    p, q : array_like of float, shape (V,), or SparseDistribution
        Target and draft. Of q only the token's own entry is read.
    token_id : int
    alpha : float
    rule : {"tokenv1", "tokenv2", "tokenv3"}

    Returns
    -------
    bool

    Raises
    ------
    ValueError, IndexError
        As in `Cascade` and `acceptance_probability`; p is no distribution.

    Examples
    --------
    >>> cascade_token_deferral([0.5, 0.3, 0.2], [0.2, 0.2, 0.6], 2, alpha=0.5, rule="tokenv3")
    True
    """
    cdef double tolerance = tolerance_of(alpha), p_token, q_token
    cdef deferral by = deferral_of(rule)
    token = integer(token_id, "a token id")
    p_token = one_probability(p, token, "target_p")
    q_token = one_probability(q, token, "draft_q")
    bound = deferral_bound(by, largest(p, "target_p"), tolerance)
    return (q_token if by == BY_DRAFT else p_token) < bound


def cascade_token_target_distribution(p, q, *, alpha, rule):
    """``pi(v) = q(v) (1 - r(v)) + p(v) sum_w r(w) q(w)``: the law of what a cascade emits.

    Parameters
    ----------
    p, q : array_like of float, shape (V,), or SparseDistribution
        Target and draft.
    alpha : float
    rule : {"tokenv1", "tokenv2", "tokenv3"}

    Returns
    -------
    ndarray of float64, shape (V,), or SparseDistribution
        Normalised. Sparse if both are: ids ascending, no zero entries. If pi has no mass, the target: a
        normalised copy, or **the target object itself** for a sparse pair.

    Raises
    ------
    ValueError
        As in `Cascade`; p is no distribution, an entry of q is negative or not finite, lengths differ.

    References
    ----------
    H. Narasimhan et al. (arXiv:2405.19261).

    Examples
    --------
    >>> cascade_token_target_distribution([0.5, 0.25, 0.25], [0.0, 0.5, 0.5], alpha=0.25, rule="tokenv1")
    array([0. , 0.5, 0.5])
    >>> cascade_token_target_distribution([0.5, 0.25, 0.25], [0.0, 0.5, 0.5], alpha=0.125, rule="tokenv2")
    array([0.5 , 0.25, 0.25])
    """
    cdef double tolerance = tolerance_of(alpha), bound, total
    cdef deferral by = deferral_of(rule)
    cdef cnp.ndarray target, draft, result
    cdef Py_ssize_t n
    bound = deferral_bound(by, largest(p, "target_p"), tolerance)
    if isinstance(p, SparseDistributionBase) and isinstance(q, SparseDistributionBase):
        return sparse_target(p, q, by == BY_DRAFT, bound)
    draft = draft_weights(q)
    require_same_length(p, q)
    target = open_law(p, "target_p", &total, False)
    n = cnp.PyArray_DIM(target, 0)
    result = new_doubles(n)
    cascade_into(doubles(target), doubles(draft), n, by == BY_DRAFT, bound, doubles(result))
    if normalise(doubles(result), n) > 0.0:
        return result
    result[:] = target
    normalise(doubles(result), n)
    return result


cdef cnp.ndarray draft_weights(object draft_q):
    """A draft row as float64, finite and not negative; it need not have mass."""
    cdef Row row
    cdef cnp.ndarray weights
    if isinstance(draft_q, SparseDistributionBase):
        return dense_array(require_support(draft_q))
    _owner = open_row(draft_q, "draft_q", &row)
    weights = new_doubles(row.n)
    widen_into(&row, doubles(weights))
    bad = np.flatnonzero(~((weights >= 0.0) & (weights < INFINITY)))
    if bad.size:
        raise ValueError(f"draft_q must be finite and not negative: entry {bad[0]} is {weights[bad[0]]}")
    return weights


cdef void cascade_into(const double *p, const double *q, Py_ssize_t n, bint by_draft, double bound,
                       double *out) noexcept nogil:
    """pi, undivided; entries that are not finite count as 0."""
    cdef const double *compared = q if by_draft else p
    cdef Py_ssize_t i
    cdef double mass = 0.0
    for i in range(n):
        if compared[i] < bound:
            mass += q[i]
    for i in range(n):
        out[i] = (0.0 if compared[i] < bound else q[i]) + p[i] * mass
        if not out[i] < INFINITY:
            out[i] = 0.0


cdef object sparse_target(object target_p, object draft_q, bint by_draft, double bound):
    cdef cnp.ndarray ids, p, q, out
    target, draft = ascending_copy(target_p), ascending_copy(draft_q)
    ids = np.union1d(target.token_ids, draft.token_ids)
    p, q, out = (np.zeros(len(ids)) for _ in range(3))
    p[np.searchsorted(ids, target.token_ids)] = target.probs
    q[np.searchsorted(ids, draft.token_ids)] = draft.probs
    cascade_into(doubles(p), doubles(q), len(ids), by_draft, bound, doubles(out))
    support = np.flatnonzero(np.asarray(out))
    if not support.size:
        return target_p
    out = np.asarray(out)[support]
    ids = np.asarray(ids)[support]
    normalise(doubles(out), len(out))
    return adopt(ids, out, max(target_p.vocab_size, draft_q.vocab_size))
