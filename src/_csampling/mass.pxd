from mtplx._csampling.arrays cimport Row
from mtplx._csampling.dispatch cimport twofold

cdef enum:
    ROW_FINE
    ROW_WITHOUT_MASS
    ROW_BAD          # negative, NaN or infinite

# What scales weights whose sum overflows: a power of two, so that nothing that counts is rounded.
cdef double OVERFLOW_SCALE

# total += value, keeping what rounding takes.
cdef inline void add_twofold(twofold *total, double value) noexcept nogil:
    cdef double part = total.sum + value
    cdef double moved = part - total.sum
    total.lost += (total.sum - (part - moved)) + (value - moved)
    total.sum = part

# Checks a row of probabilities and sums it; the sum may overflow.
cdef int weigh_row(const Row *row, twofold *total) noexcept nogil

# The row as float64.
cdef void widen_into(const Row *row, double *out) noexcept nogil
