"""Sums of rows of probabilities."""

from libc.math cimport INFINITY
from libc.string cimport memcpy

from mtplx._csampling.arrays cimport Row, probs_piece
from mtplx._csampling.dispatch cimport BLOCK, CHUNK, table, twofold

OVERFLOW_SCALE = 2.0 ** -64


cdef int weigh_row(const Row *row, twofold *total) noexcept nogil:
    cdef double buffer[CHUNK]
    cdef double sums[2]  # CHUNK / BLOCK
    cdef const double *piece
    cdef Py_ssize_t start = 0, length, block
    total.sum = total.lost = 0.0
    while start < row.n:
        length = probs_piece(row, start, CHUNK, buffer, &piece)
        if table.block_sums(piece, length, sums) or table.max_f64(piece, length) == INFINITY:
            return ROW_BAD
        for block in range((length + BLOCK - 1) // BLOCK):
            add_twofold(total, sums[block])
        start += length
    return ROW_FINE if total.sum > 0.0 else ROW_WITHOUT_MASS


cdef void widen_into(const Row *row, double *out) noexcept nogil:
    cdef double buffer[CHUNK]
    cdef const double *piece
    cdef Py_ssize_t start = 0, length
    while start < row.n:
        length = probs_piece(row, start, CHUNK, buffer, &piece)
        memcpy(out + start, piece, length * sizeof(double))
        start += length
