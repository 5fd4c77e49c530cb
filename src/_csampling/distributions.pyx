"""Data types whose fields the core's loops read.

Design: `SparseDistributionBase` holds two arrays, lends them read-only, and has pointers into them. A linear
merge of two supports needs ascending ids, so whether they ascend is settled once, at construction.
The Python subclass of `mtplx.distributions` is registered at import; the core makes instances of it.
"""

import operator

import numpy as np

cimport cython
cimport numpy as cnp
from cpython.object cimport PyObject, PyTypeObject
from libc.math cimport isfinite
from libc.stdint cimport int64_t
from libc.string cimport memcpy

from mtplx._csampling.dlpack import widen_bfloat16

from mtplx._csampling.arrays cimport integer
from mtplx._csampling.mass cimport OVERFLOW_SCALE

cnp.import_array()

cdef tuple NOTHING = ()
cdef object sparse_type = None
cdef object batch_type = None
cdef object non_finite_logits_type = None
cdef object describe_bad_logits = None


def register_python_types(sparse, batch, non_finite_logits, describe):
    """Tell the core which Python classes it is to make; called once by `mtplx.distributions`."""
    global sparse_type, batch_type, non_finite_logits_type, describe_bad_logits
    sparse_type = sparse
    batch_type = batch
    non_finite_logits_type = non_finite_logits
    describe_bad_logits = describe


cdef bint is_batch(object rows) except -1:
    return isinstance(rows, batch_type)


cdef object bad_logits(object logits, str where):
    return describe_bad_logits(widen_bfloat16(logits), where)


@cython.dataclasses.dataclass(frozen=True)
cdef class SpeculativeDecision:
    """Outcome of the verification of one drafted token.

    Parameters
    ----------
    accepted : bool
        Whether the drafted token was kept.
    token_id : int
        The token to emit: the draft, or its correction.
    accept_probability : float
        ``min(1, p(x)/q(x))``, reported whatever the outcome.

    Examples
    --------
    >>> SpeculativeDecision(True, 5, 0.25)
    SpeculativeDecision(accepted=True, token_id=5, accept_probability=0.25)
    """

    accepted: bool
    token_id: int
    accept_probability: float


cdef SpeculativeDecision new_decision(bint accepted, int64_t token_id, double accept_probability):
    cdef SpeculativeDecision made = SpeculativeDecision.__new__(SpeculativeDecision)
    made.accepted = accepted
    made.token_id = token_id
    made.accept_probability = accept_probability
    return made


cdef cnp.ndarray new_array(Py_ssize_t count, int typenum):
    cdef cnp.npy_intp shape = count
    return cnp.PyArray_EMPTY(1, &shape, typenum, 0)


cdef bint plain(object values, int typenum) noexcept:
    """One-dimensional, contiguous, native and of this type: its memory can be read as it lies."""
    return (cnp.PyArray_Check(values) and cnp.PyArray_NDIM(<cnp.ndarray>values) == 1
            and cnp.PyArray_TYPE(<cnp.ndarray>values) == typenum
            and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>values))


cdef object as_ids(object token_ids):
    """Any array_like of integers as a contiguous int64 array; the order and every value are kept."""
    values = np.asarray(token_ids)
    if values.size == 0 and values.dtype.kind == "f":
        values = values.astype(np.int64)
    if values.dtype.kind == "O":
        for value in values.flat:
            if not -(1 << 63) <= operator.index(value) < (1 << 63):
                raise ValueError(f"token id {value} is outside the vocabulary")
    elif values.dtype.kind not in "iu":
        raise TypeError(f"token_ids must be integers, not {values.dtype}")
    if values.dtype == np.uint64 and values.size and int(values.max()) >= 1 << 63:
        raise ValueError(f"token id {int(values.max())} is outside the vocabulary")
    return np.ascontiguousarray(values, dtype=np.int64) if values.ndim else values.astype(np.int64)


cdef object as_weights(object probs):
    """Any array_like of real numbers as a contiguous float64 array."""
    values = np.asarray(probs)
    if values.dtype.kind in "cSUMm" or (values.dtype.kind == "V" and values.dtype.type is np.void):
        raise TypeError(f"probs must be real numbers, not {values.dtype}")
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(values, dtype=np.float64) if values.ndim else values.astype(np.float64)


cdef int64_t first_duplicate(cnp.ndarray ids) except -2:
    """An id that stands twice, or -1."""
    cdef cnp.ndarray ordered = np.sort(ids)
    cdef const int64_t *sorted_ids = <const int64_t *>cnp.PyArray_DATA(ordered)
    cdef Py_ssize_t i
    for i in range(cnp.PyArray_DIM(ordered, 0) - 1):
        if sorted_ids[i] == sorted_ids[i + 1]:
            return sorted_ids[i]
    return -1


cdef double compensated(const double *weights, Py_ssize_t count) noexcept nogil:
    """The sum (Neumaier): its error does not grow with how many there are. Not finite if it overflows."""
    cdef double total = 0.0, lost = 0.0, new_total, weight
    cdef Py_ssize_t i
    for i in range(count):
        weight = weights[i]
        new_total = total + weight
        lost += (total - new_total) + weight if total >= weight else (weight - new_total) + total
        total = new_total
    return total + lost


cdef double normalise(double *weights, Py_ssize_t count) noexcept nogil:
    """Divide finite weights by their sum; returns the sum, or 0.0 and changes nothing where there is none.

    Weights whose sum overflows are scaled by a power of two first, which loses nothing that counts. Once is
    enough for any number of finite ones; others came from a row that was written over meanwhile.
    """
    cdef double total = compensated(weights, count)
    cdef Py_ssize_t i
    if not isfinite(total):
        for i in range(count):
            weights[i] *= OVERFLOW_SCALE
        total = compensated(weights, count)
    if total > 0.0 and total != 1.0:
        for i in range(count):
            weights[i] /= total
    return total


cdef cnp.ndarray lend(object owner, int typenum, Py_ssize_t count, const void *memory):
    """An array over memory of `owner` that no flag makes writable, since its base is no array."""
    cdef cnp.npy_intp shape = count
    cdef cnp.ndarray array = cnp.PyArray_SimpleNewFromData(1, &shape, typenum, <void *>memory)
    cnp.PyArray_CLEARFLAGS(array, cnp.NPY_ARRAY_WRITEABLE)
    cnp.set_array_base(array, owner)
    return array


@cython.no_gc  # holds arrays of numbers only; nothing takes them away while lent ones live
cdef class SparseDistributionBase:
    """Storage of a sparse distribution; see `mtplx.distributions.SparseDistribution`."""

    @property
    def token_ids(self):
        if self.id_array is None:
            return None
        return lend(self, cnp.NPY_INT64, self.count, self.ids)

    @property
    def probs(self):
        if self.weight_array is None:
            return None
        return lend(self, cnp.NPY_DOUBLE, self.count, self.weights)

    def __init__(self, token_ids, probs, vocab_size):
        cdef Py_ssize_t i, count
        cdef int64_t token_id, size, previous = -1
        cdef bint ascending = True
        cdef cnp.ndarray ids, weights
        cdef const double *given
        cdef const int64_t *own_ids
        cdef double *out
        cdef double weight
        if not plain(token_ids, cnp.NPY_INT64):
            token_ids = as_ids(token_ids)
        if not plain(probs, cnp.NPY_DOUBLE):
            probs = as_weights(probs)
        if cnp.PyArray_NDIM(<cnp.ndarray>token_ids) != 1 or cnp.PyArray_NDIM(<cnp.ndarray>probs) != 1:
            raise ValueError(f"token_ids and probs must be one-dimensional, not of shapes "
                             f"{token_ids.shape} and {probs.shape}")
        if self.count:  # asked behind all that may run code of the caller's
            raise AttributeError("a SparseDistribution is immutable")
        count = cnp.PyArray_DIM(<cnp.ndarray>token_ids, 0)
        if count != cnp.PyArray_DIM(<cnp.ndarray>probs, 0):
            raise ValueError(f"token_ids has {count} entries, probs {len(probs)}")
        if count == 0:
            raise ValueError("a distribution needs at least one token")
        size = vocabulary_size(vocab_size)
        ids = new_array(count, cnp.NPY_INT64)
        weights = new_array(count, cnp.NPY_DOUBLE)
        # Checked is what is kept, not what another thread may write over.
        memcpy(cnp.PyArray_DATA(ids), cnp.PyArray_DATA(<cnp.ndarray>token_ids), count * sizeof(int64_t))
        own_ids = <const int64_t *>cnp.PyArray_DATA(ids)
        given = <const double *>cnp.PyArray_DATA(<cnp.ndarray>probs)
        out = <double *>cnp.PyArray_DATA(weights)
        for i in range(count):
            token_id = own_ids[i]
            if not 0 <= token_id < size:
                raise ValueError(f"token id {token_id} is outside [0, {size})")
            ascending &= token_id > previous
            previous = token_id
            weight = given[i]
            if weight < 0.0 and isfinite(weight):
                raise ValueError(f"token {token_id} has the negative probability {weight}")
            # + 0.0 turns -0.0 into 0.0
            out[i] = weight + 0.0 if isfinite(weight) else 0.0
        if not ascending:
            token_id = first_duplicate(ids)
            if token_id >= 0:
                raise ValueError(f"token id {token_id} is given twice")
        if not normalise(out, count) > 0.0:
            raise non_finite_logits_type(
                "no probability is positive and finite",
                nan_count=int(np.isnan(probs).sum()),
                inf_count=int(np.isinf(probs).sum()),
                vocab_size=vocab_size,
            )
        self.attach(ids, weights, size, ascending)

    cdef void attach(self, cnp.ndarray ids, cnp.ndarray weights, int64_t vocab_size, bint ascending):
        self.id_array = ids
        self.weight_array = weights
        self.vocab_size = vocab_size
        self.ids = <const int64_t *>cnp.PyArray_DATA(ids)
        self.weights = <const double *>cnp.PyArray_DATA(weights)
        self.count = cnp.PyArray_DIM(ids, 0)
        self.ascending = ascending

    cdef Support support(self) noexcept nogil:
        cdef Support support
        support.ids = self.ids
        support.weights = self.weights
        support.count = self.count
        return support

    cdef double lookup(self, int64_t token_id) noexcept nogil:
        cdef Support support = self.support()
        return find(&support, self.ascending, token_id)

    @classmethod
    def one_hot(cls, token_id, vocab_size):
        """The distribution with all its mass on `token_id`.

        Examples
        --------
        >>> from mtplx.distributions import SparseDistribution
        >>> SparseDistribution.one_hot(2, 4).to_dense()
        array([0., 0., 1., 0.])
        """
        return cls([integer(token_id, "a token id")], [1.0], vocab_size)

    def probability(self, token_id):
        """Probability of `token_id`; 0.0 for any integer outside the support."""
        token_id = integer(token_id, "a token id")
        if not 0 <= token_id < self.vocab_size:
            return 0.0
        return self.lookup(token_id)

    def to_dense(self):
        """The same distribution as a fresh float64 array of `vocab_size` entries."""
        return dense_array(self)

    def __eq__(self, other):
        if not isinstance(other, SparseDistributionBase):
            return NotImplemented
        return (self.vocab_size == other.vocab_size and np.array_equal(self.token_ids, other.token_ids)
                and np.array_equal(self.probs, other.probs))

    def __reduce__(self):
        stored = (type(self), self.token_ids, self.probs, self.vocab_size)
        return restore, stored, getattr(self, "__dict__", None)


cdef double find(const Support *support, bint ascending, int64_t token_id) noexcept nogil:
    cdef Py_ssize_t i, low, high
    if ascending and support.count > 32:
        low = 0
        high = support.count
        while low < high:
            i = (low + high) >> 1
            if support.ids[i] < token_id:
                low = i + 1
            else:
                high = i
        return support.weights[low] if low < support.count and support.ids[low] == token_id else 0.0
    for i in range(support.count):
        if support.ids[i] == token_id:
            return support.weights[i]
    return 0.0


cdef cnp.ndarray dense_array(SparseDistributionBase distribution):
    cdef cnp.npy_intp shape = distribution.vocab_size
    cdef cnp.ndarray dense = cnp.PyArray_ZEROS(1, &shape, cnp.NPY_DOUBLE, 0)
    cdef double *out = <double *>cnp.PyArray_DATA(dense)
    cdef Py_ssize_t i
    for i in range(distribution.count):
        out[distribution.ids[i]] = distribution.weights[i]
    return dense


cdef SparseDistributionBase require_support(SparseDistributionBase distribution):
    if distribution.count == 0:
        raise TypeError("the SparseDistribution was never initialised")
    return distribution


cdef SparseDistributionBase ascending_copy(SparseDistributionBase distribution):
    require_support(distribution)
    if distribution.ascending:
        return distribution
    order = np.argsort(distribution.token_ids, kind="stable")
    return adopt(distribution.token_ids[order], distribution.probs[order], distribution.vocab_size)


def restore(cls, token_ids, probs, vocab_size):
    """Rebuild a pickled or copied distribution from its stored bits; nothing is normalised again.

    ValueError where no distribution can have stored them.
    """
    cdef cnp.ndarray ids = stored(token_ids, "token_ids", np.int64)
    cdef cnp.ndarray weights = stored(probs, "probs", np.float64)
    cdef Py_ssize_t i, count = cnp.PyArray_DIM(ids, 0)
    cdef int64_t token_id, previous = -1, size
    cdef double weight
    cdef bint ascending = True, mass = False
    cdef SparseDistributionBase made
    try:
        size = vocabulary_size(vocab_size)
    except TypeError:
        raise ValueError(f"vocab_size is {vocab_size!r}") from None
    if count == 0 or count != cnp.PyArray_DIM(weights, 0):
        raise ValueError(f"token_ids has {count} entries, probs {cnp.PyArray_DIM(weights, 0)}")
    for i in range(count):
        token_id = (<const int64_t *>cnp.PyArray_DATA(ids))[i]
        weight = (<const double *>cnp.PyArray_DATA(weights))[i]
        if not 0 <= token_id < size:
            raise ValueError(f"token id {token_id} is outside [0, {size})")
        if not (weight >= 0.0 and isfinite(weight)):
            raise ValueError(f"token {token_id} has the probability {weight}")
        ascending &= token_id > previous
        previous = token_id
        mass |= weight > 0.0
    if not mass:
        raise ValueError("no probability is positive")
    if not ascending:
        token_id = first_duplicate(ids)
        if token_id >= 0:
            raise ValueError(f"token id {token_id} is given twice")
    made = cls.__new__(cls)
    if made.count:
        raise ValueError(f"{cls.__name__} makes distributions that hold something already")
    made.attach(ids, weights, size, ascending)
    return made


cdef cnp.ndarray stored(object values, str name, object dtype):
    """A fresh copy of an array of this type, of either byte order."""
    wanted = np.dtype(dtype)
    if not (cnp.PyArray_Check(values) and values.ndim == 1 and values.dtype.kind == wanted.kind
            and values.dtype.itemsize == wanted.itemsize):
        raise ValueError(f"{name} must be a one-dimensional array of {wanted}")
    return np.array(values, dtype=wanted, order="C", subok=False)


cdef int64_t vocabulary_size(object vocab_size) except -1:
    size = integer(vocab_size, "vocab_size")
    if not 0 < size < (1 << 63):
        raise ValueError(f"vocab_size is {size}")
    return size


cdef SparseDistributionBase adopt(object token_ids, object probs, int64_t vocab_size):
    # The type's own slot: `__new__` as an attribute is looked up, bound and checked.
    cdef SparseDistributionBase made = (<PyTypeObject *>sparse_type).tp_new(
        sparse_type, <PyObject *>NOTHING, NULL)
    cdef const int64_t *ids = <const int64_t *>cnp.PyArray_DATA(<cnp.ndarray>token_ids)
    cdef Py_ssize_t i, count = cnp.PyArray_DIM(<cnp.ndarray>token_ids, 0)
    cdef bint ascending = True
    for i in range(count - 1):
        ascending &= ids[i] < ids[i + 1]
    made.attach(token_ids, probs, vocab_size, ascending)
    return made
