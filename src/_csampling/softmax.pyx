"""Softmax of one row.

Design: one pass for the maximum (and NaN), one that writes exponentials and sums them, one that
divides. float16 and bfloat16 are widened a CHUNK at a time into a buffer that stays in the L1 cache.
The three passes are cheaper than one pass with a running maximum: the exponentials need no rescaling.
"""

cimport numpy as cnp
from libc.math cimport INFINITY, isfinite, isinf, isnan
from libc.stdint cimport int64_t
from libc.string cimport memset

from mtplx._csampling.arrays cimport F64, LONG_ROW, Row, doubles, logits_piece, open_out, open_row, real
from mtplx._csampling.dispatch cimport (
    CHUNK,
    SCALE_DIVIDE,
    SCALE_NONE,
    SCALE_RECIPROCAL,
    SCALE_SHIFT,
    running,
    scaling,
    table,
)
from mtplx._csampling.distributions cimport bad_logits

cnp.import_array()

# Division of these temperatures by Markstein's correction loses nothing (kernels_body.h); the float32
# exponentials need a narrower range.
cdef double RECIPROCAL_LOW = 2.0 ** -960, RECIPROCAL_HIGH = 2.0 ** 960
cdef double NARROW_LOW = 2.0 ** -60, NARROW_HIGH = 2.0 ** 60, NARROW_TOP = 2.0 ** 16


cdef double largest_logit(const Row *row) noexcept nogil:
    cdef double buffer[CHUNK]
    cdef const void *piece
    cdef bint single
    cdef Py_ssize_t start = 0, length
    cdef double largest = -INFINITY, here
    while start < row.n:
        length = logits_piece(row, start, buffer, &piece, &single)
        here = table.max_f32(<const float *>piece, length) if single else table.max_f64(
            <const double *>piece, length)
        if isnan(here):
            return here
        if here > largest:
            largest = here
        start += length
    return largest


cdef Py_ssize_t first_at(const Row *row, double largest) noexcept nogil:
    """The first id whose value is the row's largest; 0, should another thread have written that over."""
    cdef double buffer[CHUNK]
    cdef int64_t ids[CHUNK]
    cdef double values[CHUNK]
    cdef const void *piece
    cdef bint single
    cdef Py_ssize_t start = 0, length, at
    cdef size_t hits
    while start < row.n:
        length = logits_piece(row, start, buffer, &piece, &single)
        at = 0
        while at < length:
            hits = min(length - at, <Py_ssize_t>CHUNK)
            if single:
                hits = table.collect_f32(<const float *>piece + at, hits, largest, start + at, ids, values)
            else:
                hits = table.collect_f64(<const double *>piece + at, hits, largest, start + at, ids, values)
            if hits:
                return ids[0]
            at += CHUNK
        start += length
    return 0


cdef void set_scaling(scaling *s, double temperature, double largest) noexcept nogil:
    s.temperature = temperature
    s.reciprocal = 1.0 / temperature
    s.largest = largest
    s.top = largest
    if temperature == 1.0:
        s.rule = SCALE_NONE
        return
    s.rule = SCALE_RECIPROCAL if RECIPROCAL_LOW < temperature < RECIPROCAL_HIGH else SCALE_DIVIDE
    s.top = table.scaled(largest, s)
    if not isfinite(s.top):
        s.rule = SCALE_SHIFT
        s.top = largest


cdef double exponentials(const Row *row, const scaling *s, double *out) noexcept nogil:
    cdef double buffer[CHUNK]
    cdef const void *piece
    cdef bint single
    cdef Py_ssize_t start = 0, length
    cdef running total
    memset(&total, 0, sizeof(total))
    while start < row.n:
        length = logits_piece(row, start, buffer, &piece, &single)
        if out is NULL and single:
            table.exp_sum_f32(<const float *>piece, length, s, &total)
        elif out is NULL:
            table.exp_sum_f64(<const double *>piece, length, s, &total)
        elif single:
            table.exp_f32(<const float *>piece, length, s, out + start, &total)
        else:
            table.exp_f64(<const double *>piece, length, s, out + start, &total)
        start += length
    return table.total(&total)


cdef double narrow_exponentials(const Row *row, const scaling *s, float *out) noexcept nogil:
    """The exponentials as float32, times a common factor, and their sum as float64."""
    cdef double buffer[CHUNK]
    cdef double wide[CHUNK]
    cdef const void *piece
    cdef bint single
    cdef bint direct = (table.fused and row.kind != F64 and NARROW_LOW < s.temperature < NARROW_HIGH
                        and -NARROW_TOP < s.top < NARROW_TOP)
    cdef Py_ssize_t start = 0, length, i
    cdef running total
    memset(&total, 0, sizeof(total))
    while start < row.n:
        length = logits_piece(row, start, buffer, &piece, &single)
        if direct:
            table.exp_narrow(<const float *>piece, length, s, out + start, &total)
        else:
            length = min(length, <Py_ssize_t>CHUNK)
            if single:
                table.exp_f32(<const float *>piece, length, s, wide, &total)
            else:
                table.exp_f64(<const double *>piece, length, s, wide, &total)
            for i in range(length):
                out[start + i] = <float>wide[i]
        start += length
    return table.total(&total)


cdef void uniform_into(const Row *row, double *out) noexcept nogil:
    """The limit of an infinite temperature: equal mass on everything above -inf."""
    cdef double buffer[CHUNK]
    cdef const void *piece
    cdef bint single
    cdef Py_ssize_t start = 0, length, i, count = 0
    cdef double x
    while start < row.n:
        length = logits_piece(row, start, buffer, &piece, &single)
        for i in range(length):
            x = (<const float *>piece)[i] if single else (<const double *>piece)[i]
            out[start + i] = x > -INFINITY
            count += x > -INFINITY
        start += length
    table.divide_f64(out, row.n, <double>count, out)


cdef int softmax_into(const Row *row, double temperature, double *out) noexcept nogil:
    cdef scaling s
    cdef double largest = largest_logit(row)
    if not isfinite(largest):
        return LOGITS_BAD
    if temperature <= 0.0:
        memset(out, 0, row.n * sizeof(double))
        out[first_at(row, largest)] = 1.0
    elif isinf(temperature):
        uniform_into(row, out)
    else:
        set_scaling(&s, temperature, largest)
        table.divide_f64(out, row.n, exponentials(row, &s, out), out)
    return LOGITS_FINE


cdef int narrow_softmax_into(const Row *row, double temperature, float *out) noexcept nogil:
    """softmax_into with a float32 result, for 0 < T < inf."""
    cdef scaling s
    cdef double largest = largest_logit(row)
    if not isfinite(largest):
        return LOGITS_BAD
    set_scaling(&s, temperature, largest)
    table.divide_f32(out, row.n, narrow_exponentials(row, &s, out), out)
    return LOGITS_FINE


def softmax(logits, temperature=1.0, *, out=None):
    """``exp(z) / sum exp(z)`` with ``z = x/T - max(x/T)``.

    Where ``x/T`` overflows, ``z = (x - max x)/T``, so that finite logits always give a distribution.

    Parameters
    ----------
    logits : array_like of float, shape (V,)
        Entries of -inf get probability 0. float16, bfloat16, float32 and float64 are read in place.
    temperature : float
        T. Zero or less: one-hot at the largest logit, the lowest id among equals. inf: uniform over
        the entries above -inf.
    out : ndarray of float64 or float32, shape (V,), optional
        C-contiguous and writable; receives the result and is returned.

    Returns
    -------
    ndarray of float64, shape (V,)
        Or `out`. Within 8 float64 ulp of the reference (4 float32 ulp for a float32 `out`).

    Raises
    ------
    NonFiniteLogitsError
        A logit is NaN or +inf, or none is above -inf; at T <= 0 too.
    ValueError
        `temperature` is NaN; `logits` is not one-dimensional or is empty; `out` does not fit.
    TypeError
        `logits` does not hold real numbers.

    Examples
    --------
    >>> softmax([0.0, 0.0, float("-inf")])
    array([0.5, 0.5, 0. ])
    """
    cdef Row row
    cdef cnp.ndarray result
    cdef float *narrow
    cdef double *wide
    cdef int status
    cdef double heat = real(temperature, "temperature")
    owner = open_row(logits, "logits", &row)
    if isnan(heat):
        raise ValueError("temperature is nan")
    result = open_out(out, row.n, (logits, owner), True)
    if cnp.PyArray_TYPE(result) == cnp.NPY_FLOAT:
        if not 0.0 < heat < INFINITY:
            out[:] = softmax(owner, heat)
            return out
        narrow = <float *>cnp.PyArray_DATA(result)
        with nogil:
            status = narrow_softmax_into(&row, heat, narrow)
        if status == LOGITS_BAD:
            raise bad_logits(owner, "softmax")
        return result
    wide = doubles(result)
    if row.n > LONG_ROW:
        with nogil:
            status = softmax_into(&row, heat, wide)
    else:
        status = softmax_into(&row, heat, wide)
    if status == LOGITS_BAD:
        raise bad_logits(owner, "softmax")
    return result
