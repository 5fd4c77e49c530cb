"""Exact laws and distances of one row."""

import math

import numpy as np

cimport numpy as cnp
from libc.math cimport frexp, isfinite, ldexp
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from mtplx._csampling.acceptance cimport difference_arrays
from mtplx._csampling.arrays cimport (
    F64,
    Row,
    bad_probabilities,
    doubles,
    new_doubles,
    open_row,
    probs_piece,
)
from mtplx._csampling.dispatch cimport BLOCK, CHUNK, running, table
from mtplx._csampling.distributions cimport SparseDistributionBase, Support, ascending_copy, dense_array
from mtplx._csampling.draws cimport new_sums
from mtplx._csampling.mass cimport OVERFLOW_SCALE, ROW_FINE, weigh_row, widen_into

cnp.import_array()

# Rows with a smaller sum are raised by a power of two first: their entries may be subnormal.
TINY_TOTAL = 2.0 ** -60
ENTROPY_ERROR = 2e-12
cdef double RAISE = 2.0 ** 512


cdef cnp.ndarray open_law(object distribution, str name, double *total, bint scaled=True):
    cdef Row row
    cdef cnp.ndarray array
    cdef Py_ssize_t i
    if isinstance(distribution, SparseDistributionBase):
        distribution = dense_array(distribution)
    owner = open_row(distribution, name, &row)  # alive until the row has been widened
    array = owner
    if weigh_row(&row, total) != ROW_FINE:
        raise bad_probabilities(array, name)
    scaled = scaled and not isfinite(total[0])
    if row.kind != F64 or scaled:
        array = new_doubles(row.n)
        widen_into(&row, doubles(array))
    if scaled:
        for i in range(row.n):
            doubles(array)[i] *= OVERFLOW_SCALE
        row.kind = F64
        row.data = <const char *>doubles(array)
        weigh_row(&row, total)
    return array


cdef void normalise_into(cnp.ndarray weights, double total, double *out) noexcept nogil:
    table.divide_f64(doubles(weights), cnp.PyArray_DIM(weights, 0), total, out)


cdef double fold_sums(const double *sums, Py_ssize_t n) noexcept nogil:
    cdef running total
    memset(&total, 0, sizeof(total))
    table.weigh(sums, (n + BLOCK - 1) // BLOCK, &total)
    return table.total(&total)


def speculative_output_marginal(target_p, draft_q):
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
    cdef double p_total, q_total, mass, shared, rate
    cdef running overlap
    cdef cnp.ndarray target = open_law(target_p, "target_p", &p_total)
    cdef cnp.ndarray draft = open_law(draft_q, "draft_q", &q_total)
    cdef Py_ssize_t n = cnp.PyArray_DIM(target, 0), m = cnp.PyArray_DIM(draft, 0)
    cdef cnp.ndarray p = new_doubles(n), q = new_doubles(max(n, m)), result = new_doubles(n)
    cdef double *to = doubles(result)
    cdef double *sums
    cdef Py_ssize_t i
    if n != m:
        if not (isinstance(target_p, SparseDistributionBase) and isinstance(draft_q, SparseDistributionBase)):
            raise ValueError(f"target_p has {n} entries, draft_q {m}")
        # Ids beyond the target's vocabulary carry draft mass that is always rejected.
        q[:] = 0.0
    sums = new_sums(n)
    if sums is NULL:
        raise MemoryError
    with nogil:
        normalise_into(target, p_total, doubles(p))
        normalise_into(draft, q_total, doubles(q))
        table.block_sums_residual(doubles(p), doubles(q), n, sums)
        mass = fold_sums(sums, n)
        memset(&overlap, 0, sizeof(overlap))
        table.overlap(doubles(p), doubles(q), n, &overlap)
        shared = table.total(&overlap)
        rate = (1.0 - shared) / mass if mass > 0.0 else 1.0 - shared
        if mass > 0.0:
            table.marginal(doubles(p), doubles(q), n, rate, to)
        else:
            # The residual is the target.
            for i in range(n):
                to[i] = doubles(p)[i] + rate * doubles(p)[i]
    free(sums)
    return result


def total_variation(p, q):
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
    cdef double ignored, distance
    cdef Support p_support, q_support
    cdef cnp.ndarray left, right
    cdef double *sums
    cdef Py_ssize_t n
    if isinstance(p, SparseDistributionBase) and isinstance(q, SparseDistributionBase):
        p = ascending_copy(p)
        q = ascending_copy(q)
        p_support = (<SparseDistributionBase>p).support()
        q_support = (<SparseDistributionBase>q).support()
        _, left = difference_arrays(&p_support, &q_support)
        n = cnp.PyArray_DIM(left, 0)
        if n == 0:
            return 0.0
        sums = new_sums(n)
        if sums is NULL:
            raise MemoryError
        with nogil:
            table.block_sums(doubles(left), n, sums)
            distance = fold_sums(sums, n)
        free(sums)
        return distance
    left = open_law(p, "p", &ignored, False)
    right = open_law(q, "q", &ignored, False)
    n = cnp.PyArray_DIM(left, 0)
    if n != cnp.PyArray_DIM(right, 0):
        raise ValueError(f"p has {n} entries, q {len(right)}")
    sums = new_sums(n)
    if sums is NULL:
        raise MemoryError
    with nogil:
        table.block_sums_residual(doubles(left), doubles(right), n, sums)
        distance = fold_sums(sums, n)
    free(sums)
    return distance


def distribution_entropy(distribution):
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
    cdef double total
    cdef cnp.ndarray weights
    cdef Row row
    if isinstance(distribution, SparseDistributionBase):
        distribution = distribution.probs
    weights = open_law(distribution, "distribution", &total)
    if total < TINY_TOTAL:
        return distribution_entropy(np.asarray(weights) * RAISE)
    row.data = <const char *>doubles(weights)
    row.n = cnp.PyArray_DIM(weights, 0)
    row.kind = F64
    row.patches = 0
    return entropy_of(&row, total)


cdef double entropy_of(const Row *weights, double total) noexcept nogil:
    # -sum p log p with p = w/S is log S - (sum w log w)/S. A power of two brings S near 1 first.
    cdef double buffer[CHUNK]
    cdef const double *piece
    cdef running sums
    cdef Py_ssize_t start = 0, length
    cdef double scale, entropy
    cdef int exponent
    frexp(total, &exponent)
    scale = ldexp(1.0, min(max(-exponent, -1022), 1022))
    total *= scale
    memset(&sums, 0, sizeof(sums))
    while start < weights.n:
        length = probs_piece(weights, start, weights.n, buffer, &piece)
        table.sum_p_log_p(piece, length, scale, &sums)
        start += length
    entropy = -table.total(&sums) / total
    memset(&sums, 0, sizeof(sums))
    table.sum_p_log_p(&total, 1, 1.0, &sums)
    entropy += table.total(&sums) / total
    return entropy if entropy > 0.0 else 0.0


# ---- the entropy as it is defined ----------------------------------------------------------------
# Only NumPy's logarithm and NumPy's order of summation give its bits.


cdef double accurate_sum(object values) except -1.0:
    """The sum that the definition divides by: values are cut at one bit, so that upper parts add exactly."""
    _, exponent = math.frexp(float(values.max()))
    if exponent > 900:
        return accurate_sum(values * 2.0 ** -200) * 2.0 ** 200
    cut = math.ldexp(1.5, exponent + values.size.bit_length())
    upper = (values + cut) - cut
    return float(upper.sum() + (values - upper).sum())


cdef double distance_as_defined(object p, object q) except -1.0:
    """The total variation of two distributions that were checked, with the bits of the reference."""
    cdef Support left, right
    if isinstance(p, SparseDistributionBase) and isinstance(q, SparseDistributionBase):
        p = ascending_copy(p)
        q = ascending_copy(q)
        left = (<SparseDistributionBase>p).support()
        right = (<SparseDistributionBase>q).support()
        _, differences = difference_arrays(&left, &right)
    else:
        differences = np.maximum(law_array(p) - law_array(q), 0.0)
    with np.errstate(over="ignore"):
        return float(differences.sum()) if len(differences) else 0.0


cdef object law_array(object distribution):
    cdef double ignored
    return open_law(distribution, "distribution", &ignored, False)


cdef double entropy_as_defined(const double *weights, Py_ssize_t n) except -1.0:
    cdef cnp.ndarray values = new_doubles(n)
    memcpy(doubles(values), weights, n * sizeof(double))
    with np.errstate(all="ignore"):
        total = accurate_sum(values)
        if math.isinf(total):
            values = values * OVERFLOW_SCALE
            total = accurate_sum(values)
        p = np.asarray(values / total)
        p = p[p > 0.0]
        return float(-(p * np.log(p)).sum()) + 0.0
