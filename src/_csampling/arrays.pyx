"""The way in and the way out: array_likes as rows of memory, and arrays for results.

Design: the common case (a one-dimensional, contiguous, native float array) is recognised by hand in
some 20 ns; a typed memoryview parameter would cost ten times that. Everything else takes the slow
way through NumPy, which keeps float16, bfloat16, float32 and float64 in their type: a strided or
byte-swapped row is copied in its own type, never to float64.
"""

import operator
from collections.abc import Mapping

import numpy as np

cimport numpy as cnp
from libc.stdint cimport int64_t
from libc.string cimport memcpy

from mtplx._csampling.dlpack import BFLOAT16, widen_bfloat16
from mtplx._csampling.dlpack import imported as import_array

cnp.import_array()

cdef extern from "numpy/arrayobject.h":
    enum:
        NPY_HALF

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object value, int *overflow) except? -1
    bint PyLong_CheckExact(object value)
    bint PyFloat_CheckExact(object value)
    double PyFloat_AS_DOUBLE(object value)


cdef object imported(object values, str name):
    """An array or an array of another library on the CPU, of whatever dtype, without a copy."""
    return import_array(values, name)


cdef bint is_bfloat16(object dtype):
    """bfloat16 of a package that gives NumPy such a type, or of DLPack."""
    return dtype.name == "bfloat16" or dtype == BFLOAT16


cdef object as_array(object values, str name):
    array = imported(values, name)
    kind = array.dtype.kind
    if kind == "f" or kind in "biu":
        return array
    if kind == "O":
        for value in array.flat:
            if not hasattr(value, "__float__") or isinstance(value, np.complexfloating):
                raise TypeError(f"{name} must hold real numbers, not objects")
        with np.errstate(all="ignore"):
            return array.astype(np.float64)
    if kind == "V" and (array.dtype == BFLOAT16 or (
            array.dtype.names is None and array.dtype.type is not np.void)):
        return array  # bfloat16, or a number type of another package
    raise TypeError(f"{name} must hold real numbers, not {array.dtype}")


cdef object as_rows_array(object rows, str name):
    if not (hasattr(rows, "__array__") or hasattr(rows, "__dlpack__")):
        # One class at a time: Cython drops the errors of isinstance with a tuple, and Mapping's runs Python
        # code, where a signal handler may raise.
        if isinstance(rows, (str, bytes)) or isinstance(rows, Mapping) or not (
                hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
            raise TypeError(f"{name} must be an array or a sequence of rows, not {type(rows).__name__}")
        return rows
    rows = imported(rows, name)
    if rows.ndim != 2 and not (rows.ndim == 1 and (rows.size == 0 or rows.dtype.kind == "O")):
        raise ValueError(f"{name} must be rows, of shape (N, V), not of shape {rows.shape}")
    return rows


cdef object as_row(object values, str name):
    """A one-dimensional, contiguous, aligned, native array of one of the four types."""
    array = as_array(values, name)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be one-dimensional and not empty, not of shape {array.shape}")
    if array.dtype.char in "efd":
        return np.require(array, array.dtype.newbyteorder("="), ["C", "A"])
    if is_bfloat16(array.dtype):
        return np.require(array, None, ["C", "A"])
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(array, dtype=np.float64)


cdef object open_row(object values, str name, Row *row):
    cdef cnp.ndarray array
    cdef int typenum
    if not (cnp.PyArray_CheckExact(values) and cnp.PyArray_NDIM(<cnp.ndarray>values) == 1
            and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>values)
            and cnp.PyArray_TYPE(<cnp.ndarray>values) in (cnp.NPY_DOUBLE, cnp.NPY_FLOAT, NPY_HALF)
            and cnp.PyArray_DIM(<cnp.ndarray>values, 0) > 0):
        values = as_row(values, name)
    array = <cnp.ndarray>values
    typenum = cnp.PyArray_TYPE(array)
    row.kind = F64 if typenum == cnp.NPY_DOUBLE else F32 if typenum == cnp.NPY_FLOAT else (
        F16 if typenum == NPY_HALF else BF16)
    row.data = <const char *>cnp.PyArray_DATA(array)
    row.n = cnp.PyArray_DIM(array, 0)
    row.patches = 0
    return array


cdef Py_ssize_t first_patch(const Row *row, Py_ssize_t start) noexcept nogil:
    """Place of the first patch at or behind start."""
    cdef Py_ssize_t low = 0, high = row.patches, middle
    while low < high:
        middle = (low + high) >> 1
        if row.patch_ids[middle] < start:
            low = middle + 1
        else:
            high = middle
    return low


cdef Py_ssize_t patched_chunk(const Row *row, Py_ssize_t start, double *buffer,
                              Py_ssize_t *free) noexcept nogil:
    cdef Py_ssize_t place = first_patch(row, start), length = min(row.n - start, <Py_ssize_t>CHUNK)
    cdef const double *piece
    free[0] = row.n - start
    if place == row.patches:
        return 0
    if row.patch_ids[place] >= start + length:
        free[0] = min(row.n, row.patch_ids[place] // CHUNK * CHUNK) - start
        return 0
    probs_piece(row, start, length, buffer, &piece)
    if piece is not buffer:
        memcpy(buffer, piece, length * sizeof(double))
    while place < row.patches and row.patch_ids[place] < start + length:
        buffer[row.patch_ids[place] - start] = row.patch_values[place]
        place += 1
    return length


cdef double logit(const Row *row, Py_ssize_t i) noexcept nogil:
    cdef Py_ssize_t place
    if row.patches:
        place = first_patch(row, i)
        if place < row.patches and row.patch_ids[place] == i:
            return row.patch_values[place]
    return element(row, i)


cdef object bad_probabilities(object row, str name):
    values = widen_bfloat16(np.asarray(row)).astype(np.float64)
    wrong = np.flatnonzero(~((values >= 0.0) & (values < np.inf)))
    if wrong.size:
        return ValueError(f"{name} must be finite and not negative: entry {wrong[0]} is {values[wrong[0]]}")
    return ValueError(f"{name} has no positive mass")


cdef cnp.ndarray new_doubles(Py_ssize_t n):
    cdef cnp.npy_intp shape = n
    return cnp.PyArray_EMPTY(1, &shape, cnp.NPY_DOUBLE, 0)


cdef cnp.ndarray new_ids(Py_ssize_t n):
    cdef cnp.npy_intp shape = n
    return cnp.PyArray_EMPTY(1, &shape, cnp.NPY_INT64, 0)


cdef cnp.ndarray open_out(object out, Py_ssize_t n, tuple inputs, bint float32_too=False):
    cdef cnp.ndarray array
    if out is None:
        return new_doubles(n)
    if not cnp.PyArray_Check(out) or not out.dtype.isnative or not (
            out.dtype == np.float64 or (float32_too and out.dtype == np.float32)):
        found = out.dtype if cnp.PyArray_Check(out) else type(out).__name__
        wanted = "float64 or float32" if float32_too else "float64"
        raise ValueError(f"out must be an array of {wanted}, not {found}")
    array = <cnp.ndarray>out
    if cnp.PyArray_NDIM(array) != 1 or cnp.PyArray_DIM(array, 0) != n:
        raise ValueError(f"out must have shape ({n},), not {out.shape}")
    if not cnp.PyArray_ISCARRAY(array):
        raise ValueError("out must be C-contiguous, aligned and writable")
    for values in inputs:
        if cnp.PyArray_Check(values) and np.shares_memory(out, values):
            raise ValueError("out overlaps an input")
    return array


cdef double real(object value, str name) except? -1.0:
    if PyFloat_CheckExact(value):
        return PyFloat_AS_DOUBLE(value)
    kind = type(value)
    if issubclass(kind, str) or issubclass(kind, bytes) or not (
            hasattr(kind, "__float__") or hasattr(kind, "__index__")):
        raise TypeError(f"{name} must be a real number, not {value!r}")
    try:
        return float(value)
    except TypeError as error:  # as of an array of several
        raise TypeError(f"{name} must be a real number, not {value!r}") from error


cdef object integer(object value, str name):
    if PyLong_CheckExact(value):
        return value
    if not hasattr(type(value), "__index__"):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    try:
        return operator.index(value)
    except TypeError as error:  # as of an array of several
        raise TypeError(f"{name} must be an integer, not {value!r}") from error


cdef int64_t id_within(object token_id, Py_ssize_t n) except -1:
    cdef int overflow = 0
    cdef long long token
    token_id = integer(token_id, "a token id")
    token = PyLong_AsLongLongAndOverflow(token_id, &overflow)
    if overflow or not 0 <= token < n:
        raise IndexError(f"token id {token_id} is outside [0, {n})")
    return token


cdef Py_ssize_t ranks_kept(object top_k, Py_ssize_t n) except -1:
    cdef int overflow = 0
    cdef long long k
    if top_k is None:
        return 0
    top_k = integer(top_k, "top_k")
    k = PyLong_AsLongLongAndOverflow(top_k, &overflow)
    return k if not overflow and 0 < k < n else 0
