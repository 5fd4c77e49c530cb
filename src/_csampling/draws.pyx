"""Random numbers, and categorical draws.

Design: a `numpy.random.Generator` is drawn from through its bit generator's C interface, under its lock,
which gives exactly the stream of its own methods; everything else is called as the Python object it is.

A categorical draw is defined by sequential cumulative sums c_i: the first i with c_i / c_n > u. It is
found by sums of blocks, of which only one is walked. With all weights >= 0 the sequential c_i is within
(i - 1) 2^-53 of the exact sum, relatively, and so is each of ours; c_i / c_n rounds once more. So with
t = u c_n, an entry whose cumulative sum is farther from t than (2n + 16) 2^-53 c_n is on the side it
seems to be. Where the chosen entry or the one before it is closer, the sums are taken again one by one.
"""

import numpy as np

cimport numpy as cnp
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.math cimport INFINITY, isfinite
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from mtplx._csampling.arrays cimport (
    F64,
    LONG_ROW,
    Row,
    bad_probabilities,
    doubles,
    element,
    new_doubles,
    open_row,
    probs_piece,
)
from mtplx._csampling.dispatch cimport (
    BLOCK,
    CATEGORICAL_DRAW,
    CHUNK,
    CORRECTION_DRAW,
    count_fallback,
    running,
    table,
)
from mtplx._csampling.distributions cimport SparseDistributionBase, require_support
from mtplx._csampling.mass cimport OVERFLOW_SCALE, UNIT

cnp.import_array()

cdef object Generator = np.random.Generator


cdef bint is_plain(object rng):
    return type(rng) is Generator


cdef object open_rng(object rng):
    if type(rng) is Generator:
        return rng
    if rng is None:
        return np.random.default_rng()
    for method in ("random", "choice"):
        if not callable(getattr(rng, method, None)):
            raise TypeError(f"rng must have random and choice methods; {type(rng).__name__} lacks {method}")
    return rng


cdef bitgen_t *bitgen_of(object bit_generator) except NULL:
    """Valid as long as the caller holds a reference to `bit_generator`."""
    return <bitgen_t *>PyCapsule_GetPointer(bit_generator.capsule, "BitGenerator")


cdef double *new_sums(Py_ssize_t n) noexcept nogil:
    return <double *>malloc((n + BLOCK - 1) // BLOCK * sizeof(double))


# ---- dense ---------------------------------------------------------------------------------------


cdef Py_ssize_t weights_piece(const Weights *weights, Py_ssize_t start, double *buffer, double *other,
                              const double **piece) noexcept nogil:
    cdef running ignored
    cdef const double *p
    cdef const double *q
    cdef const Removed *removed
    cdef Py_ssize_t i, length
    if weights.q is NULL and weights.scale == 1.0 and not weights.positive_part:
        return probs_piece(weights.p, start, weights.p.n, buffer, piece)
    length = probs_piece(weights.p, start, CHUNK, buffer, &p)
    if weights.q is NULL:
        for i in range(length):
            # One residual against nothing: entries that are negative or not finite count as 0.
            other[i] = 0.0
        q = other
    else:
        probs_piece(weights.q, start, CHUNK, other, &q)
        if weights.factor != 1.0:
            for i in range(length):
                buffer[i] = weights.factor * p[i]
            p = buffer
        if weights.multiple != 1.0:
            for i in range(length):
                other[i] = weights.multiple * q[i]
            q = other
    memset(&ignored, 0, sizeof(ignored))
    table.residual(p, q, length, buffer, &ignored)
    if weights.removed_count > 0:
        for i in range(first_removed(weights.removed, weights.removed_count, start), weights.removed_count):
            removed = weights.removed + i
            if removed.token >= start + length:
                break
            buffer[removed.token - start] = difference_of(weights, removed.token, removed.multiple)
    if weights.scale != 1.0:
        for i in range(length):
            buffer[i] *= weights.scale
    piece[0] = buffer
    return length


cdef double scaled_weight(const Weights *weights, Py_ssize_t token) noexcept nogil:
    cdef int place = first_removed(weights.removed, weights.removed_count, token)
    if place < weights.removed_count and weights.removed[place].token == token:
        return difference_of(weights, token, weights.removed[place].multiple)
    return difference_of(weights, token, weights.multiple)


cdef double difference_of(const Weights *weights, Py_ssize_t token, double multiple) noexcept nogil:
    cdef double weight = weights.factor * element(weights.p, token) - multiple * element(weights.q, token)
    return weight if weight > 0.0 and isfinite(weight) else 0.0


cdef int first_removed(const Removed *removed, int count, int64_t token) noexcept nogil:
    cdef int low = 0, high = count, middle
    while low < high:
        middle = (low + high) >> 1
        if removed[middle].token < token:
            low = middle + 1
        else:
            high = middle
    return low


cdef bint weigh(Weights *weights, const Row *p, const Row *q, bint positive_part,
                double *sums) noexcept nogil:
    weights.p = p
    weights.q = q
    weights.factor = weights.multiple = 1.0
    weights.removed_count = 0
    weights.positive_part = False
    weights.scale = 1.0
    weights.sums = sums
    if positive_part:
        # Mostly there is nothing to leave out, and the row can be read where it lies.
        if add_up(weights, 0):
            return True
        weights.positive_part = True
        weights.scale = 1.0
    if q is not NULL and p.kind == F64 and q.kind == F64:
        table.block_sums_residual(<const double *>p.data, <const double *>q.data, p.n, sums)
        return add_up(weights, p.n)
    return add_up(weights, 0)


cdef bint weigh_scaled(Weights *weights, const Row *p, const Row *q, double factor, double multiple,
                       const Removed *removed, int removed_count, double *sums) noexcept nogil:
    cdef double buffer[CHUNK]
    cdef double other[CHUNK]
    cdef const double *piece
    cdef Py_ssize_t start, length, done = 0
    cdef int i
    weights.p = p
    weights.q = q
    weights.factor = factor
    weights.multiple = multiple
    weights.removed = removed
    weights.removed_count = removed_count
    weights.positive_part = False
    weights.scale = 1.0
    weights.sums = sums
    if p.kind == F64 and q.kind == F64:
        table.block_sums_scaled(<const double *>p.data, <const double *>q.data, p.n, factor, multiple, sums)
        for i in range(removed_count):
            # Where other multiples are subtracted: the sums of these pieces alone, each of them once.
            if removed[i].token < done:
                continue
            start = removed[i].token // CHUNK * CHUNK
            length = weights_piece(weights, start, buffer, other, &piece)
            table.block_sums(piece, length, sums + start // BLOCK)
            done = start + length
        return add_up(weights, p.n)
    return add_up(weights, 0)


cdef bint add_up(Weights *weights, Py_ssize_t start) noexcept nogil:
    """The sums from `start` on, and their total; False if that is not positive, or an entry is bad."""
    cdef double buffer[CHUNK]
    cdef double other[CHUNK]
    cdef const double *piece
    cdef Py_ssize_t length, block, n = weights.p.n
    cdef bint masked = False
    while True:
        while start < n:
            length = weights_piece(weights, start, buffer, other, &piece)
            if table.block_sums(piece, length, weights.sums + start // BLOCK):
                return False
            start += length
        weights.total = 0.0
        for block in range((n + BLOCK - 1) // BLOCK):
            weights.total += weights.sums[block]
        if isfinite(weights.total) or weights.scale != 1.0:
            return weights.total > 0.0
        if weights.q is not NULL and not masked:
            # A difference that is infinite counts as 0, which `block_sums_residual` does not see to.
            masked = True
            start = 0
            continue
        # Weights too large for their sum, or an infinite one.
        if weights.q is NULL and not weights.positive_part and infinite(weights.p):
            return False
        weights.scale = OVERFLOW_SCALE
        start = 0


cdef bint infinite(const Row *p) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(p.n):
        if element(p, i) == INFINITY:
            return True
    return False


cdef Py_ssize_t draw(const Weights *weights, double u) noexcept nogil:
    cdef double buffer[CHUNK]
    cdef double other[CHUNK]
    cdef const double *piece
    cdef Py_ssize_t n = weights.p.n, block = 0, last = (n - 1) // BLOCK, i, at, length
    cdef double target = u * weights.total
    cdef double tolerance = (2.0 * n + 16.0) * UNIT * weights.total
    cdef double before = 0.0, cumulative
    while block < last and before + weights.sums[block] <= target - tolerance:
        before += weights.sums[block]
        block += 1
    # `before` lies below the target for certain (or is 0); walk on from here.
    at = block * BLOCK
    cumulative = before
    while at < n:
        length = weights_piece(weights, at // CHUNK * CHUNK, buffer, other, &piece)
        piece += at % CHUNK
        length -= at % CHUNK
        for i in range(length):
            before = cumulative
            cumulative += piece[i]
            if cumulative > target:
                if cumulative - target > tolerance and (before == 0.0 or target - before > tolerance):
                    return at + i
                return replay(weights, u)
        at += length
    return replay(weights, u)


cdef Py_ssize_t replay(const Weights *weights, double u) noexcept nogil:
    """The draw by its definition."""
    cdef double buffer[CHUNK]
    cdef double other[CHUNK]
    cdef const double *piece
    cdef Py_ssize_t n = weights.p.n, start = 0, length, i
    cdef double total = 0.0, cumulative = 0.0
    count_fallback(CATEGORICAL_DRAW if weights.q is NULL else CORRECTION_DRAW)
    while start < n:
        length = weights_piece(weights, start, buffer, other, &piece)
        for i in range(length):
            total += piece[i]
        start += length
    start = 0
    while start < n:
        length = weights_piece(weights, start, buffer, other, &piece)
        for i in range(length):
            cumulative += piece[i]
            if cumulative / total > u:
                return start + i
        start += length
    return n - 1  # not reached: the last cumulative sum is the total, and u < 1


cdef cnp.ndarray weights_array(const Weights *weights):
    cdef double buffer[CHUNK]
    cdef double other[CHUNK]
    cdef const double *piece
    cdef cnp.ndarray array = new_doubles(weights.p.n)
    cdef double *to = doubles(array)
    cdef Py_ssize_t start = 0, length, i
    while start < weights.p.n:
        length = weights_piece(weights, start, buffer, other, &piece)
        for i in range(length):
            to[start + i] = piece[i]
        start += length
    return array


# ---- sparse, and objects that draw by themselves -------------------------------------------------


cdef Py_ssize_t draw_place(const double *weights, Py_ssize_t count, double u) noexcept nogil:
    cdef double total = 0.0, cumulative = 0.0
    cdef Py_ssize_t i
    for i in range(count):
        total += weights[i]
    for i in range(count):
        cumulative += weights[i]
        if cumulative / total > u:
            return i
    return count - 1


cdef int64_t draw_by_choice(object rng, object ids, object weights) except? -1:
    return int(rng.choice(ids, p=weights / weights.sum()))


def sample_from_distribution(probs, rng=None):
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
    cdef SparseDistributionBase sparse
    cdef bitgen_t *bits
    cdef Py_ssize_t place
    if not isinstance(probs, SparseDistributionBase):
        return Drawable(probs).draw(rng)
    sparse = require_support(probs)
    rng = open_rng(rng)
    if not is_plain(rng):
        return draw_by_choice(rng, sparse.token_ids, sparse.probs)
    bit_generator = rng.bit_generator
    bits = bitgen_of(bit_generator)
    lock = bit_generator.lock
    lock.acquire()
    place = draw_place(sparse.weights, sparse.count, uniform(bits))
    lock.release()
    return sparse.ids[place]


cdef class Drawable:
    """A row that was checked and summed up, to be drawn from without an error."""

    cdef Row row
    cdef Weights weights
    cdef double *sums
    cdef object owner

    def __cinit__(self, probs):
        cdef bint usable
        self.owner = open_row(probs, "probs", &self.row)
        self.sums = new_sums(self.row.n)
        if self.sums is NULL:
            raise MemoryError
        if self.row.n > LONG_ROW:
            with nogil:
                usable = weigh(&self.weights, &self.row, NULL, False, self.sums)
        else:
            usable = weigh(&self.weights, &self.row, NULL, False, self.sums)
        if not usable:
            raise bad_probabilities(self.owner, "probs")

    def __dealloc__(self):
        free(self.sums)

    def draw(self, rng):
        """One token; `rng` as in `sample_from_distribution`."""
        cdef bitgen_t *bits
        cdef Py_ssize_t place
        rng = open_rng(rng)
        if not is_plain(rng):
            return draw_by_choice(rng, np.arange(self.row.n), weights_array(&self.weights))
        bit_generator = rng.bit_generator
        bits = bitgen_of(bit_generator)
        lock = bit_generator.lock
        lock.acquire()
        if self.row.n > LONG_ROW:
            with nogil:
                place = draw(&self.weights, uniform(bits))
        else:
            place = draw(&self.weights, uniform(bits))
        lock.release()
        return place
