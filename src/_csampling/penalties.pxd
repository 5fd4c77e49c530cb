from libc.stdint cimport int64_t

from mtplx._csampling.arrays cimport Row


# What penalties and an overlay make of single logits of a row: kept as patches, not as a copy of the row.
cdef class Patches:
    cdef int64_t *ids
    cdef double *values
    cdef Py_ssize_t count

    cdef void attach(self, Row *row) noexcept nogil

# Counts (None where no penalty looks at them) and overlay, so that open_patches runs no code of the caller's:
# to be called before the address of a row is taken. TypeError if one is no mapping, or holds no numbers.
cdef tuple read_mappings(object token_counts, object overlay, double presence, double frequency)

# The parts of it: one mapping is checked; it is read, as itself where it is a dict of numbers, else as pairs.
cdef object require_mapping(object mapping, str name)
cdef object plain_numbers(object mapping, str name)

# The patches of one row, None where there is nothing to do, of what read_mappings gave. Checks everything.
cdef Patches open_patches(const Row *row, object token_counts, double presence, double frequency,
                          object overlay)

# A penalty within its range; ValueError if it is NaN.
cdef double clamped(object penalty, str name) except? -3.0
