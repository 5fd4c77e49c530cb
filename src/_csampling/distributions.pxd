cimport numpy as cnp
from libc.stdint cimport int64_t


cdef class SpeculativeDecision:
    cdef readonly bint accepted
    cdef readonly int64_t token_id
    cdef readonly double accept_probability


cdef SpeculativeDecision new_decision(bint accepted, int64_t token_id, double accept_probability)


# The support of a sparse distribution as its loops see it.
cdef struct Support:
    const int64_t *ids
    const double *weights
    Py_ssize_t count


cdef class SparseDistributionBase:
    cdef cnp.ndarray id_array
    cdef cnp.ndarray weight_array
    cdef readonly int64_t vocab_size
    cdef const int64_t *ids
    cdef const double *weights
    cdef Py_ssize_t count
    cdef bint ascending

    cdef void attach(self, cnp.ndarray ids, cnp.ndarray weights, int64_t vocab_size, bint ascending)
    cdef double lookup(self, int64_t token_id) noexcept nogil
    cdef Support support(self) noexcept nogil

# Weight of an id, 0.0 if it is not there.
cdef double find(const Support *support, bint ascending, int64_t token_id) noexcept nogil


# A new SparseDistribution from arrays that the caller made and gives away: ids distinct and within the
# vocabulary, probabilities as they are to be.
cdef SparseDistributionBase adopt(object token_ids, object probs, int64_t vocab_size)

# The same distribution as a fresh dense array; with its ids ascending (itself if they do).
cdef cnp.ndarray dense_array(SparseDistributionBase distribution)
cdef SparseDistributionBase ascending_copy(SparseDistributionBase distribution)

# Whether it is a BatchedSparseDistributions.
cdef bint is_batch(object rows) except -1

# The same object; TypeError if it was never initialised.
cdef SparseDistributionBase require_support(SparseDistributionBase distribution)

# Divides finite, non-negative weights by their compensated sum; returns it, 0.0 where there is no mass.
cdef double normalise(double *weights, Py_ssize_t count) noexcept nogil

# The error to raise for a row of logits that gives no distribution.
cdef object bad_logits(object logits, str where)
