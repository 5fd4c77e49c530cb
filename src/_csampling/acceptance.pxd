from mtplx._csampling.distributions cimport Support


# min(1, p/q), 1 for q = 0 < p, 0 for p = 0.
cdef inline double acceptance(double p, double q) noexcept nogil:
    cdef double ratio
    if q == 0.0:
        return 1.0 if p > 0.0 else 0.0
    ratio = p / q
    return ratio if ratio < 1.0 else 1.0

# Ids and weights of (p - q)+; empty where no difference is positive. Both ascend.
cdef tuple difference_arrays(const Support *p, const Support *q)

# factor p - q at entry i of p; `place` walks along q. Both ascend.
cdef double next_difference(const Support *p, const Support *q, double factor, Py_ssize_t i,
                            Py_ssize_t *place) noexcept nogil

# p(x), of which nothing else is read.
cdef double one_probability(object distribution, object token_id, str name) except -1.0

# ValueError where the lengths of two distributions differ, one of them being dense.
cdef object require_same_length(object target_p, object draft_q)
