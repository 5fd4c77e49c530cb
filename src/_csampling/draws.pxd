from libc.stdint cimport int64_t

cimport numpy as cnp

from mtplx._csampling.arrays cimport Row

cdef extern from "numpy/random/bitgen.h" nogil:
    ctypedef struct bitgen_t:
        void *state
        double (*next_double)(void *state) noexcept nogil

# A token of which another multiple is subtracted than of all others.
cdef struct Removed:
    int64_t token
    double multiple

# What a draw is from: a row, or the differences (factor p - multiple q)+ of two rows.
cdef struct Weights:
    const Row *p
    const Row *q          # NULL: p itself
    double factor         # 1 where there is no q, like the next
    double multiple
    const Removed *removed   # by ascending token
    int removed_count     # 0 where there is no q
    bint positive_part    # count entries of p that are negative or not finite as 0
    double scale          # 1, or what keeps the sum from overflowing
    double total
    double *sums          # one per BLOCK

# A generator to draw from: None becomes a fresh one, what cannot draw is refused.
cdef object open_rng(object rng)

# Whether numbers may be taken through the bit generator itself.
cdef bint is_plain(object rng)
cdef bitgen_t *bitgen_of(object bit_generator) except NULL

cdef inline double uniform(bitgen_t *bits) noexcept nogil:
    return bits.next_double(bits.state)

# Room for the sums of n elements.
cdef double *new_sums(Py_ssize_t n) noexcept nogil

# Sums up what a draw is from; False if there is no finite positive mass, or an entry that may not be.
cdef bint weigh(Weights *weights, const Row *p, const Row *q, bint positive_part, double *sums) noexcept nogil

# Place of the first of them at or behind a token.
cdef int first_removed(const Removed *removed, int count, int64_t token) noexcept nogil

# The same as `weigh` of (factor p - multiple q)+; a NaN counts as 0.
cdef bint weigh_scaled(Weights *weights, const Row *p, const Row *q, double factor, double multiple,
                       const Removed *removed, int removed_count, double *sums) noexcept nogil

# One of its weights, but for what scales them all.
cdef double scaled_weight(const Weights *weights, Py_ssize_t token) noexcept nogil

# The next weights of a row; at most a CHUNK at a time where they have to be computed, into the buffer.
cdef Py_ssize_t weights_piece(const Weights *weights, Py_ssize_t start, double *buffer, double *other,
                              const double **piece) noexcept nogil

# The first id whose sequential cumulative weight divided by the last one exceeds u.
cdef Py_ssize_t draw(const Weights *weights, double u) noexcept nogil

# The same over the entries of a sparse distribution, in storage order; returns the place.
cdef Py_ssize_t draw_place(const double *weights, Py_ssize_t count, double u) noexcept nogil

# A draw through the methods of any other object.
cdef int64_t draw_by_choice(object rng, object ids, object weights) except? -1

# The differences or entries that a draw is from, as an array.
cdef cnp.ndarray weights_array(const Weights *weights)
