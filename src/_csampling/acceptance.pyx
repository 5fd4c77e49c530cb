"""Acceptance of a drafted token, and what replaces it on rejection."""

import numpy as np

cimport numpy as cnp
from libc.math cimport isfinite
from libc.stdint cimport int64_t
from libc.stdlib cimport free
from libc.string cimport memset

from mtplx._csampling.arrays cimport (
    F64,
    LONG_ROW,
    Row,
    doubles,
    element,
    id_within,
    ids_of,
    integer,
    new_doubles,
    new_ids,
    open_out,
    open_row,
    probs_piece,
)
from mtplx._csampling.dispatch cimport CHUNK, running, table
from mtplx._csampling.distributions cimport (
    SparseDistributionBase,
    Support,
    adopt,
    ascending_copy,
    dense_array,
    new_decision,
    normalise,
    require_support,
)
from mtplx._csampling.draws cimport (
    Weights,
    bitgen_of,
    bitgen_t,
    draw,
    draw_by_choice,
    draw_place,
    is_plain,
    new_sums,
    open_rng,
    uniform,
    weigh,
    weights_array,
)
from mtplx._csampling.mass cimport OVERFLOW_SCALE

cnp.import_array()

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object value, int *overflow) except? -1


# ---- two numbers ---------------------------------------------------------------------------------


cdef int64_t any_id(object token_id) except? -2:
    """An id for sparse distributions: any integer, -1 if it cannot be one of theirs."""
    cdef int overflow = 0
    cdef int64_t token
    token_id = integer(token_id, "a token id")
    token = PyLong_AsLongLongAndOverflow(token_id, &overflow)
    return -1 if overflow or token < 0 else token


cdef double one_probability(object distribution, object token_id, str name) except -1.0:
    cdef Row row
    cdef int64_t token
    cdef double probability
    if isinstance(distribution, SparseDistributionBase):
        token = any_id(token_id)
        return 0.0 if token < 0 else (<SparseDistributionBase>distribution).lookup(token)
    _owner = open_row(distribution, name, &row)
    token = id_within(token_id, row.n)
    probability = element(&row, token)
    if not (probability >= 0.0 and isfinite(probability)):
        raise ValueError(f"{name} must be finite and not negative: entry {token} is {probability}")
    return probability


def acceptance_probability(target_p, draft_q, token_id):
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
    cdef double p, q
    token_id = integer(token_id, "a token id")  # before memory is looked at: it may be code of the caller's
    p = one_probability(target_p, token_id, "target_p")
    q = one_probability(draft_q, token_id, "draft_q")
    return acceptance(p, q)


# ---- the differences of two sparse distributions -------------------------------------------------


cdef double next_difference(const Support *p, const Support *q, double factor, Py_ssize_t i,
                            Py_ssize_t *place) noexcept nogil:
    cdef int64_t token = p.ids[i]
    while place[0] < q.count and q.ids[place[0]] < token:
        place[0] += 1
    if place[0] < q.count and q.ids[place[0]] == token:
        return factor * p.weights[i] - q.weights[place[0]]
    return factor * p.weights[i]


cdef int64_t draw_difference(const Support *p, const Support *q, double u) noexcept nogil:
    """A token drawn by the positive differences, or by the target where there are none. Both ascend."""
    cdef double total = 0.0, cumulative = 0.0, difference
    cdef Py_ssize_t i, place = 0
    for i in range(p.count):
        difference = next_difference(p, q, 1.0, i, &place)
        if difference > 0.0:
            total += difference
    if total == 0.0:
        return p.ids[draw_place(p.weights, p.count, u)]
    place = 0
    for i in range(p.count):
        difference = next_difference(p, q, 1.0, i, &place)
        if difference > 0.0:
            cumulative += difference
            if cumulative / total > u:
                return p.ids[i]
    return p.ids[p.count - 1]  # not reached: the last sum is the total, and u < 1


cdef tuple difference_arrays(const Support *p, const Support *q):
    cdef double difference
    cdef Py_ssize_t count = 0, i, place = 0, at = 0
    cdef cnp.ndarray ids, weights
    cdef int64_t *to
    cdef double *to_weights
    for i in range(p.count):
        count += next_difference(p, q, 1.0, i, &place) > 0.0
    ids = new_ids(count)
    weights = new_doubles(count)
    to = ids_of(ids)
    to_weights = doubles(weights)
    place = 0
    for i in range(p.count):
        difference = next_difference(p, q, 1.0, i, &place)
        if difference > 0.0:
            to[at] = p.ids[i]
            to_weights[at] = difference
            at += 1
    return ids, weights


# ---- rows ----------------------------------------------------------------------------------------


cdef object open_distribution(object distribution, str name, Row *row):
    """A distribution of either kind as a row."""
    if isinstance(distribution, SparseDistributionBase):
        distribution = dense_array(distribution)
    return open_row(distribution, name, row)


cdef Py_ssize_t vocabulary(object distribution, str name) except -1:
    cdef Row row
    if isinstance(distribution, SparseDistributionBase):
        return (<SparseDistributionBase>distribution).vocab_size
    open_row(distribution, name, &row)
    return row.n


cdef object require_same_length(object target_p, object draft_q):
    cdef Py_ssize_t n = vocabulary(target_p, "target_p"), m = vocabulary(draft_q, "draft_q")
    if n != m:
        raise ValueError(f"target_p has {n} entries, draft_q {m}")


cdef bint weigh_correction(Weights *weights, const Row *p, const Row *q, double *sums) noexcept nogil:
    """(p - q)+, or the target's positive finite entries where none is positive; False without mass."""
    return weigh(weights, p, q, False, sums) or weigh(weights, p, NULL, True, sums)


def residual_distribution(target_p, draft_q, *, out=None):
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
    cdef Row p, q
    cdef SparseDistributionBase target, draft
    cdef Support target_support, draft_support
    cdef Weights weights
    cdef cnp.ndarray result
    cdef double *to
    cdef double *sums
    cdef bint usable
    if isinstance(target_p, SparseDistributionBase) and isinstance(draft_q, SparseDistributionBase):
        if out is not None:
            raise ValueError("out is for a dense result, and both distributions are sparse")
        target = ascending_copy(target_p)
        draft = ascending_copy(draft_q)
        target_support = target.support()
        draft_support = draft.support()
        ids, differences = difference_arrays(&target_support, &draft_support)
        if len(ids) == 0:
            return target_p
        normalise(doubles(differences), len(ids))
        return adopt(ids, differences, target_p.vocab_size)
    require_same_length(target_p, draft_q)
    p_owner = open_distribution(target_p, "target_p", &p)
    q_owner = open_distribution(draft_q, "draft_q", &q)
    result = open_out(out, p.n, (target_p, draft_q, p_owner, q_owner))
    to = doubles(result)
    sums = new_sums(p.n) if result is out else NULL
    with nogil:
        # What belongs to the caller is touched once nothing can fail.
        usable = sums is NULL or weigh_correction(&weights, &p, &q, sums)
        free(sums)
        usable = usable and correction_into(&p, &q, to)
    if not usable:
        raise ValueError("neither the residual nor target_p has positive mass")
    return result


cdef bint correction_into(const Row *p, const Row *q, double *out) noexcept nogil:
    """The weights of a correction divided by their compensated sum; False, and out is lost, without mass.

    The differences are stored before their sum is known: dividing them in the cache is cheaper than
    reading two rows again.
    """
    cdef double p_buffer[CHUNK]
    cdef double q_buffer[CHUNK]
    cdef const double *from_p
    cdef const double *from_q
    cdef Py_ssize_t n = p.n, start, length, i
    cdef running sum
    cdef double total, scale = 1.0
    cdef bint from_target = False
    while True:
        memset(&sum, 0, sizeof(sum))
        start = 0
        while start < n:
            length = probs_piece(p, start, n if q.kind == F64 else CHUNK, p_buffer, &from_p)
            if from_target:
                length = min(length, <Py_ssize_t>CHUNK)
                for i in range(length):
                    q_buffer[i] = 0.0
                from_q = q_buffer
            else:
                probs_piece(q, start, length, q_buffer, &from_q)
            table.residual(from_p, from_q, length, out + start, &sum)
            start += length
        if scale != 1.0:
            memset(&sum, 0, sizeof(sum))
            for i in range(n):
                out[i] *= scale
            table.weigh(out, n, &sum)
        total = table.total(&sum)
        if not isfinite(total):
            if scale != 1.0:
                return False  # the rows were written over meanwhile: scaled, finite entries have a sum
            scale = OVERFLOW_SCALE
        elif total > 0.0:
            table.divide_f64(out, n, total, out)
            return True
        elif from_target:
            return False
        else:
            from_target = True


# ---- one verification ----------------------------------------------------------------------------


cdef object verify_sparse(SparseDistributionBase p, SparseDistributionBase q, object draft_token, object rng):
    cdef int64_t token = any_id(draft_token)
    cdef double accept_probability = 0.0
    cdef Support p_support, q_support
    cdef bitgen_t *bits
    cdef bint accepted
    if token >= 0:
        accept_probability = acceptance(p.lookup(token), q.lookup(token))
    require_support(p)
    require_support(q)
    rng = open_rng(rng)
    if accept_probability == 0.0:
        # Rejected whatever the coin shows: what can fail, fails before the coin.
        p = ascending_copy(p)
        q = ascending_copy(q)
    if not is_plain(rng):
        if float(rng.random()) <= accept_probability and accept_probability > 0.0:
            return new_decision(True, token, accept_probability)
        p = ascending_copy(p)
        q = ascending_copy(q)
        p_support = p.support()
        q_support = q.support()
        ids, differences = difference_arrays(&p_support, &q_support)
        if len(ids) == 0:
            support = p.probs > 0.0
            ids, differences = p.token_ids[support], p.probs[support]
        return new_decision(False, draw_by_choice(rng, ids, differences), accept_probability)
    bit_generator = rng.bit_generator
    bits = bitgen_of(bit_generator)
    lock = bit_generator.lock
    # One hold of the lock for both numbers, so that another thread cannot draw between them.
    if not (p.ascending and q.ascending):
        lock.acquire()
        try:
            accepted = uniform(bits) <= accept_probability
            if not accepted:
                p = ascending_copy(p)
                q = ascending_copy(q)
                p_support = p.support()
                q_support = q.support()
                token = draw_difference(&p_support, &q_support, uniform(bits))
        finally:
            lock.release()
        return new_decision(accepted, token, accept_probability)
    p_support = p.support()
    q_support = q.support()
    lock.acquire()
    accepted = uniform(bits) <= accept_probability and accept_probability > 0.0
    if not accepted:
        token = draw_difference(&p_support, &q_support, uniform(bits))
    lock.release()
    return new_decision(accepted, token, accept_probability)


def verify_one_token(target_p, draft_q, draft_token, rng=None):
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
    if isinstance(target_p, SparseDistributionBase) and isinstance(draft_q, SparseDistributionBase):
        return verify_sparse(target_p, draft_q, draft_token, rng)
    return verify_rows(target_p, draft_q, draft_token, rng)


cdef object verify_rows(object target_p, object draft_q, object draft_token, object rng):
    cdef double accept_probability
    cdef bitgen_t *bits
    draft_token = integer(draft_token, "a token id")
    accept_probability = acceptance(one_probability(target_p, draft_token, "target_p"),
                                    one_probability(draft_q, draft_token, "draft_q"))
    require_same_length(target_p, draft_q)
    rng = open_rng(rng)
    if accept_probability == 0.0:
        # Rejected whatever the coin shows: what can fail, fails before the coin. With p(x) > 0 the
        # target itself has mass, and nothing can.
        return Correction(target_p, draft_q).decide(rng, accept_probability)
    if not is_plain(rng):
        if float(rng.random()) <= accept_probability:
            return new_decision(True, draft_token, accept_probability)
        return Correction(target_p, draft_q).drawn(rng, accept_probability)
    bit_generator = rng.bit_generator
    bits = bitgen_of(bit_generator)
    lock = bit_generator.lock
    lock.acquire()
    try:
        if uniform(bits) <= accept_probability:
            return new_decision(True, draft_token, accept_probability)
        return Correction(target_p, draft_q).drawn(rng, accept_probability)
    finally:
        lock.release()


cdef class Correction:
    """The weights that a correction is drawn from, with the memory they need."""

    cdef Row p, q
    cdef object owners
    cdef Weights weights
    cdef double *sums

    def __cinit__(self, target_p, draft_q):
        cdef bint usable
        self.owners = (open_distribution(target_p, "target_p", &self.p),
                       open_distribution(draft_q, "draft_q", &self.q))
        self.sums = new_sums(self.p.n)
        if self.sums is NULL:
            raise MemoryError
        if self.p.n > LONG_ROW:
            with nogil:
                usable = weigh_correction(&self.weights, &self.p, &self.q, self.sums)
        else:
            usable = weigh_correction(&self.weights, &self.p, &self.q, self.sums)
        if not usable:
            raise ValueError("neither the residual nor target_p has positive mass")

    def __dealloc__(self):
        free(self.sums)

    cdef object decide(self, object rng, double accept_probability):
        """The coin, which cannot win, then the correction."""
        cdef bitgen_t *bits
        if not is_plain(rng):
            rng.random()
            return self.drawn(rng, accept_probability)
        bit_generator = rng.bit_generator
        bits = bitgen_of(bit_generator)
        lock = bit_generator.lock
        lock.acquire()
        try:
            uniform(bits)
            return self.drawn(rng, accept_probability)
        finally:
            lock.release()

    cdef object drawn(self, object rng, double accept_probability):
        cdef Py_ssize_t token
        cdef bitgen_t *bits
        if not is_plain(rng):
            return new_decision(False, draw_by_choice(rng, np.arange(self.p.n), weights_array(&self.weights)),
                                accept_probability)
        bits = bitgen_of(rng.bit_generator)
        if self.p.n > LONG_ROW:
            with nogil:
                token = draw(&self.weights, uniform(bits))
        else:
            token = draw(&self.weights, uniform(bits))
        return new_decision(False, token, accept_probability)
