from mtplx._csampling.arrays cimport Row
from mtplx._csampling.dispatch cimport scaling

# A row of logits gives no distribution: NaN, +inf, or nothing above -inf.
cdef enum:
    LOGITS_FINE = 0
    LOGITS_BAD = 1

# Largest logit; NaN if there is one.
cdef double largest_logit(const Row *row) noexcept nogil

# First place of the largest logit, whose value is given.
cdef Py_ssize_t first_at(const Row *row, double largest) noexcept nogil

# How a row with this largest logit is scaled at 0 < T < inf.
cdef void set_scaling(scaling *s, double temperature, double largest) noexcept nogil

# out = exp(z), or nothing where out is NULL; returns the sum.
cdef double exponentials(const Row *row, const scaling *s, double *out) noexcept nogil

# out = softmax(x/T) for any T; LOGITS_BAD changes nothing.
cdef int softmax_into(const Row *row, double temperature, double *out) noexcept nogil
