"""Sums of rows of probabilities."""

from libc.math cimport INFINITY, isfinite
from libc.string cimport memcpy, memset

from mtplx._csampling.arrays cimport Row, element, probs_piece
from mtplx._csampling.dispatch cimport CHUNK, running, table

UNIT = 2.0 ** -53
OVERFLOW_SCALE = 2.0 ** -64


cdef int weigh_row(const Row *row, double *total) noexcept nogil:
    cdef double buffer[CHUNK]
    cdef const double *piece
    cdef Py_ssize_t start = 0, length, i
    cdef running sum
    memset(&sum, 0, sizeof(sum))
    while start < row.n:
        length = probs_piece(row, start, row.n, buffer, &piece)
        if table.weigh(piece, length, &sum):
            return ROW_BAD
        start += length
    total[0] = table.total(&sum)
    if not isfinite(total[0]):
        for i in range(row.n):
            if element(row, i) == INFINITY:
                return ROW_BAD
    return ROW_FINE if total[0] > 0.0 else ROW_WITHOUT_MASS


cdef void widen_into(const Row *row, double *out) noexcept nogil:
    cdef double buffer[CHUNK]
    cdef const double *piece
    cdef Py_ssize_t start = 0, length
    while start < row.n:
        length = probs_piece(row, start, CHUNK, buffer, &piece)
        memcpy(out + start, piece, length * sizeof(double))
        start += length
