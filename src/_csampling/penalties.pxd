from libc.stdint cimport int64_t

from mtplx._csampling.arrays cimport Row


# What penalties and an overlay make of single logits of a row: kept as patches, not as a copy of the row.
cdef class Patches:
    cdef int64_t *ids
    cdef double *values
    cdef Py_ssize_t count

    cdef void attach(self, Row *row) noexcept nogil

# The patches of one row, None where there is nothing to do. Checks everything.
cdef Patches open_patches(const Row *row, object token_counts, double presence, double frequency,
                          object overlay)

# TypeError if a mapping is none.
cdef object require_mapping(object mapping, str name)

# A penalty within its range; ValueError if it is NaN.
cdef double clamped(double penalty, str name) except? -3.0
