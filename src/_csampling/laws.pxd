cimport numpy as cnp

# The entropy in nats of finite weights >= 0 with this finite sum, which is at least TINY_TOTAL.
cdef double TINY_TOTAL
cdef double entropy_of(const double *weights, Py_ssize_t n, double total) noexcept nogil

# The same with the bits of the reference.
cdef double entropy_as_defined(const double *weights, Py_ssize_t n) except -1.0
cdef double distance_as_defined(object p, object q) except -1.0

# A distribution as a contiguous float64 array, checked, with its sum; scaled where that overflows.
cdef cnp.ndarray open_law(object distribution, str name, double *total, bint scaled=*)
