from mtplx._csampling.distributions cimport SparseDistributionBase

# How many differences p - q are positive, and their sequential sum. Both ascend.
cdef Py_ssize_t positive_differences(SparseDistributionBase p, SparseDistributionBase q,
                                     double *total) noexcept nogil
