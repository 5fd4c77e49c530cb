"""Top-k and top-p: of given probabilities, and straight from logits."""

cimport numpy as cnp
from libc.math cimport INFINITY, isfinite, isnan
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from mtplx._csampling.dlpack import widen_bfloat16

from mtplx._csampling.arrays cimport (
    F64,
    LONG_ROW,
    Row,
    bad_probabilities,
    doubles,
    ids_of,
    integer,
    new_doubles,
    new_ids,
    open_out,
    open_row,
    ranks_kept,
    real,
)
from mtplx._csampling.dispatch cimport table
from mtplx._csampling.distributions cimport adopt, bad_logits, normalise
from mtplx._csampling.mass cimport OVERFLOW_SCALE, ROW_FINE, ROW_WITHOUT_MASS, weigh_row, widen_into
from mtplx._csampling.penalties cimport Patches, clamped, open_patches, read_mappings
from mtplx._csampling.selection cimport (
    BAD_LOGIT,
    BAD_PROBABILITY,
    NO_MASS,
    NO_MEMORY,
    SELECTED,
    TOO_MANY,
    Candidate,
    Candidates,
    best_logits,
    best_probabilities,
    best_values,
    cut_row,
    few,
    nucleus_size,
    rank_all,
    selection_status,
    sort_candidates,
)
from mtplx._csampling.softmax cimport LOGITS_BAD, first_at, largest_logit, softmax_into

cnp.import_array()

cdef double OFF = INFINITY  # top_p that keeps everything

# Rows longer than LONG_SCAN are scanned for their best without the GIL: less is a matter of few microseconds.
# Rows shorter than SMALL are ranked by comparing whatever the number of ranks: digits cost more.
cdef enum:
    LONG_SCAN = 1 << 16
    SMALL = 1 << 10


cdef double nucleus_mass(double top_p) except -1.0:
    """top_p as the selection takes it: OFF outside (0, 1)."""
    if isnan(top_p):
        raise ValueError("top_p is nan")
    return top_p if 0.0 < top_p < 1.0 else OFF


cdef void order_by_id(Candidates *best) noexcept nogil:
    """Leaves the candidates in ascending id order, their weight in `value`."""
    cdef Py_ssize_t i
    for i in range(best.count):
        best.items[i].value = best.items[i].weight
        best.items[i].weight = -<double>best.items[i].id
    sort_candidates(best.items, best.count)


cdef bint weights_of(Candidates *best, double *weights) noexcept nogil:
    """Weights of candidates in id order, divided by their sum."""
    cdef Py_ssize_t i
    order_by_id(best)
    for i in range(best.count):
        weights[i] = best.items[i].value
    normalise(weights, best.count)
    return True


cdef selection_status scatter(Candidates *best, Py_ssize_t n, double *out) noexcept nogil:
    """A dense row from the kept candidates."""
    cdef Py_ssize_t i
    cdef double *weights = <double *>malloc(best.count * sizeof(double))
    if weights is NULL:
        return NO_MEMORY
    weights_of(best, weights)
    memset(out, 0, n * sizeof(double))
    for i in range(best.count):
        out[best.items[i].id] = weights[i]
    free(weights)
    return SELECTED


cdef selection_status cut_into(const double *p, Py_ssize_t n, double top_p, Py_ssize_t k,
                               double *out) noexcept nogil:
    """The truncated row; p and out may be the same. The result's own memory is room to work in."""
    cdef selection_status status = NO_MEMORY
    cdef double *room = <double *>malloc(n * sizeof(double)) if p is out else out
    if room is not NULL:
        status = cut_row(p, n, top_p, k, room, out)
    if p is out:
        free(room)
    return status


cdef selection_status truncate_into(const Row *row, double top_p, Py_ssize_t k, double *out) noexcept nogil:
    cdef Candidates best
    cdef selection_status status
    cdef const double *p = <const double *>row.data
    cdef double total
    cdef Row widened
    cdef Py_ssize_t i
    cdef int row_status
    if k and few(k, row.n):
        status = best_probabilities(row, k, &best)
        if status == SELECTED:
            if top_p < 1.0:
                best.count = nucleus_size(best.items, best.count, top_p)
            status = scatter(&best, row.n, out)
        free(best.items)
        return status
    if row.kind != F64 or (k == 0 and top_p == OFF):
        row_status = weigh_row(row, &total)
        if row_status != ROW_FINE:
            return NO_MASS if row_status == ROW_WITHOUT_MASS else BAD_PROBABILITY
        # The result's own memory holds the widened row.
        widen_into(row, out)
        if k == 0 and top_p == OFF:
            if not isfinite(total):
                for i in range(row.n):
                    out[i] *= OVERFLOW_SCALE
                widened.data = <const char *>out
                widened.n = row.n
                widened.kind = F64
                weigh_row(&widened, &total)
            table.divide_f64(out, row.n, total, out)
            return SELECTED
        p = out
    return cut_into(p, row.n, top_p, k, out)


cdef selection_status truncate_fully(const Row *row, double top_p, Py_ssize_t k, double *out,
                                     bint callers) noexcept nogil:
    """truncate_into, whose result is room to work in: what belongs to the caller is touched once nothing
    can fail any more."""
    cdef double total
    if callers and weigh_row(row, &total) != ROW_FINE:
        return BAD_PROBABILITY
    return truncate_into(row, top_p, k, out)


def apply_top_p_top_k(probs, top_p=1.0, top_k=0, *, out=None):
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
    cdef Row row
    cdef cnp.ndarray result
    cdef double *to
    cdef Py_ssize_t k
    cdef selection_status status
    # Settings before memory is looked at: they may be code of the caller's.
    cdef double nucleus = real(top_p, "top_p")
    if top_k is not None:
        top_k = integer(top_k, "top_k")
    owner = open_row(probs, "probs", &row)
    nucleus = nucleus_mass(nucleus)
    k = ranks_kept(top_k, row.n)
    result = open_out(out, row.n, (probs, owner))
    to = doubles(result)
    if row.n > LONG_ROW:
        with nogil:
            status = truncate_fully(&row, nucleus, k, to, result is out)
    else:
        status = truncate_fully(&row, nucleus, k, to, result is out)
    if status == NO_MEMORY:
        raise MemoryError
    if status != SELECTED:
        raise bad_probabilities(owner, "probs")
    return result


def apply_top_k_top_p(probs, top_k=0, top_p=1.0, *, out=None):
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


def deterministic_top_k_order(values, top_k):
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
    cdef Row row
    cdef Candidates best
    cdef cnp.ndarray result
    cdef int64_t *ids
    cdef Py_ssize_t k, i
    cdef selection_status status = TOO_MANY
    cdef bint ranked
    top_k = integer(top_k, "top_k")  # before memory is looked at: it may be code of the caller's
    _owner = open_row(values, "values", &row)
    k = min(max(top_k, 0), row.n)
    if k and (k <= row.n // 4 or row.n < SMALL):
        with nogil:
            status = best_values(&row, k, &best)
        if status == SELECTED:
            result = new_ids(k)
            ids = ids_of(result)
            for i in range(k):
                ids[i] = best.items[i].id
        free(best.items)
        if status == SELECTED:
            return result
    result = new_ids(row.n if k else 0)
    if k:
        ids = ids_of(result)
        with nogil:
            ranked = rank_all(&row, ids)
        if not ranked:
            raise MemoryError
    return result if k == row.n or k == 0 else result[:k].copy()


cdef selection_status logits_into(const Row *row, double temperature, double top_p, Py_ssize_t k,
                                  double *out) noexcept nogil:
    """softmax, then the truncation, densely."""
    cdef Candidates best
    cdef selection_status status
    if k and few(k, row.n) and 0.0 < temperature < INFINITY:
        status = best_logits(row, temperature, top_p, k, &best)
        if status == SELECTED:
            status = scatter(&best, row.n, out)
        free(best.items)
        if status != TOO_MANY:
            return status
    return whole_row_into(row, temperature, top_p, k, out)


cdef selection_status whole_row_into(const Row *row, double temperature, double top_p, Py_ssize_t k,
                                     double *out) noexcept nogil:
    if softmax_into(row, temperature, out) == LOGITS_BAD:
        return BAD_LOGIT
    if temperature <= 0.0 or (k == 0 and top_p == OFF):
        return SELECTED
    return cut_into(out, row.n, top_p, k, out)


cdef Patches open_settings(Row *row, double temperature, double *top_p, object top_k, Py_ssize_t *k,
                           double presence, double frequency, object token_counts, object penalty_overlay):
    """Check a configuration against a row of logits and attach the penalties, which the caller keeps."""
    cdef Patches patches = None
    if not (token_counts is None and penalty_overlay is None):
        patches = open_patches(row, token_counts, presence, frequency, penalty_overlay)
    if patches is not None:
        patches.attach(row)
    if isnan(temperature):
        raise ValueError("temperature is nan")
    top_p[0] = nucleus_mass(top_p[0])
    k[0] = ranks_kept(top_k, row.n)
    return patches


def distribution_from_logits(logits, temperature, top_p, top_k, presence_penalty, frequency_penalty,
                             token_counts, penalty_overlay, out):
    """`mtplx.sampling.distribution_from_logits` with the configuration taken apart."""
    cdef Row row
    cdef Patches _patches  # keeps what the row points to
    cdef cnp.ndarray result
    cdef double *to
    cdef Py_ssize_t k
    cdef selection_status status
    cdef double heat = real(temperature, "temperature"), nucleus = real(top_p, "top_p")
    cdef double presence = clamped(presence_penalty, "presence_penalty")
    cdef double frequency = clamped(frequency_penalty, "frequency_penalty")
    if top_k is not None:
        top_k = integer(top_k, "top_k")
    if token_counts is not None or penalty_overlay is not None:
        token_counts, penalty_overlay = read_mappings(token_counts, penalty_overlay, presence, frequency)
    owner = open_row(logits, "logits", &row)
    _patches = open_settings(&row, heat, &nucleus, top_k, &k, presence, frequency, token_counts,
                             penalty_overlay)
    result = open_out(out, row.n, (logits, owner))
    to = doubles(result)
    with nogil:
        status = logits_into(&row, heat, nucleus, k, to)
    if status == NO_MEMORY:
        raise MemoryError
    if status != SELECTED:
        raise bad_logits(penalised_row(&row, owner), "distribution_from_logits")
    return result


cdef object penalised_row(const Row *row, object owner):
    """The row with its patches, to describe an error."""
    cdef Py_ssize_t i
    values = widen_bfloat16(owner).astype("float64")
    for i in range(row.patches):
        values[row.patch_ids[i]] = row.patch_values[i]
    return values


cdef object sparse_of_best(Candidates *best, Py_ssize_t n):
    cdef cnp.ndarray ids = new_ids(best.count), weights = new_doubles(best.count)
    cdef int64_t *to = ids_of(ids)
    cdef Py_ssize_t i
    weights_of(best, doubles(weights))
    for i in range(best.count):
        to[i] = best.items[i].id
    return adopt(ids, weights, n)


cdef object sparse_of_dense(const double *p, Py_ssize_t n):
    cdef Py_ssize_t i, count = 0
    cdef cnp.ndarray ids, probs
    cdef int64_t *to
    cdef double *to_probs
    for i in range(n):
        count += p[i] != 0.0
    ids = new_ids(count)
    probs = new_doubles(count)
    to = ids_of(ids)
    to_probs = doubles(probs)
    count = 0
    for i in range(n):
        if p[i] != 0.0:
            to[count] = i
            to_probs[count] = p[i]
            count += 1
    return adopt(ids, probs, n)


def sparse_distribution_from_logits(logits, temperature, top_p, top_k, presence_penalty, frequency_penalty,
                                    token_counts, penalty_overlay):
    """`mtplx.sampling.sparse_distribution_from_logits` with the configuration taken apart."""
    cdef Row row
    cdef Patches _patches  # keeps what the row points to
    cdef Candidates best
    cdef Py_ssize_t k
    cdef double largest
    cdef double *dense
    cdef selection_status status
    cdef double heat = real(temperature, "temperature"), nucleus = real(top_p, "top_p")
    cdef double presence = clamped(presence_penalty, "presence_penalty")
    cdef double frequency = clamped(frequency_penalty, "frequency_penalty")
    if top_k is not None:
        top_k = integer(top_k, "top_k")
    if token_counts is not None or penalty_overlay is not None:
        token_counts, penalty_overlay = read_mappings(token_counts, penalty_overlay, presence, frequency)
    owner = open_row(logits, "logits", &row)
    _patches = open_settings(&row, heat, &nucleus, top_k, &k, presence, frequency, token_counts,
                             penalty_overlay)
    best.items = NULL
    try:
        if heat <= 0.0:
            largest = largest_logit(&row)
            if not isfinite(largest):
                raise bad_logits(penalised_row(&row, owner), "sparse_distribution_from_logits")
            best.items = <Candidate *>malloc(sizeof(Candidate))
            best.count = 1
            status = SELECTED if best.items is not NULL else NO_MEMORY
            if status == SELECTED:
                best.items[0].id = first_at(&row, largest)
                best.items[0].weight = 1.0
        elif k and few(k, row.n) and heat < INFINITY:
            if row.n > LONG_SCAN:
                with nogil:
                    status = best_logits(&row, heat, nucleus, k, &best)
            else:
                status = best_logits(&row, heat, nucleus, k, &best)
        else:
            status = TOO_MANY
        if status == SELECTED:
            return sparse_of_best(&best, row.n)
    finally:
        free(best.items)
    if status == TOO_MANY:
        dense = <double *>malloc(row.n * sizeof(double))
        try:
            if dense is not NULL:
                with nogil:
                    status = whole_row_into(&row, heat, nucleus, k, dense)
                if status == SELECTED:
                    return sparse_of_dense(dense, row.n)
            else:
                status = NO_MEMORY
        finally:
            free(dense)
    if status == NO_MEMORY:
        raise MemoryError
    raise bad_logits(penalised_row(&row, owner), "sparse_distribution_from_logits")
