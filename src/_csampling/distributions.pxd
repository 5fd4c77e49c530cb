cimport numpy as cnp
from libc.stdint cimport int64_t


cdef class SpeculativeDecision:
    cdef readonly bint accepted
    cdef readonly int64_t token_id
    cdef readonly double accept_probability


cdef SpeculativeDecision new_decision(bint accepted, int64_t token_id, double accept_probability)


cdef class SparseDistributionBase:
    cdef readonly object token_ids
    cdef readonly object probs
    cdef readonly int64_t vocab_size
    cdef const int64_t *ids
    cdef const double *weights
    cdef Py_ssize_t count
    cdef bint ascending

    cdef void attach(self, cnp.ndarray ids, cnp.ndarray weights, int64_t vocab_size, bint ascending)
    cdef double lookup(self, int64_t token_id) noexcept nogil


# A new SparseDistribution from arrays that the caller made and gives away; ids distinct and within
# the vocabulary, weights finite, non-negative and with positive mass. Normalises in place.
cdef SparseDistributionBase adopt(object token_ids, object weights, int64_t vocab_size)

# The error to raise for a row of logits that gives no distribution.
cdef object bad_logits(object logits, str where)
