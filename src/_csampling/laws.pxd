cimport numpy as cnp

from mtplx._csampling.arrays cimport Row

# The entropy in nats of finite weights >= 0 with this finite sum, which is at least TINY_TOTAL.
cdef double TINY_TOTAL
cdef double entropy_of(const Row *weights, double total) noexcept nogil

# Of an entropy and of the reference's together.
cdef double ENTROPY_ERROR

# The same with the bits of the reference.
cdef double entropy_as_defined(const double *weights, Py_ssize_t n) except -1.0
cdef double distance_as_defined(object p, object q) except -1.0

# A distribution as a contiguous float64 array, checked, with its sum; scaled where that overflows.
cdef cnp.ndarray open_law(object distribution, str name, double *total, bint scaled=*)
