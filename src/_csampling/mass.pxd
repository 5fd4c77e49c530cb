from mtplx._csampling.arrays cimport Row

cdef enum:
    ROW_FINE
    ROW_WITHOUT_MASS
    ROW_BAD          # negative, NaN or infinite

cdef double UNIT  # 2^-53, the relative error of one rounding

# What scales weights whose sum overflows: a power of two, so that nothing that counts is rounded.
cdef double OVERFLOW_SCALE

# Checks a row of probabilities and sums it; the sum may overflow.
cdef int weigh_row(const Row *row, double *total) noexcept nogil

# The row as float64.
cdef void widen_into(const Row *row, double *out) noexcept nogil
