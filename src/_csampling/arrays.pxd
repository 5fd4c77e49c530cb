from libc.stdint cimport int64_t, uint16_t

cimport numpy as cnp

from mtplx._csampling.dispatch cimport CHUNK, table

# How the numbers of a row lie in memory.
cdef enum:
    F64
    F32
    F16
    BF16

# Rows longer than this are worked on without the GIL; releasing it costs as much as a short row.
cdef enum:
    LONG_ROW = 4096

# One row of numbers that belongs to somebody else: contiguous, aligned, native, at least one element.
# Patches stand in place of single numbers (a penalised logit), so that a row need not be copied to be
# changed; only readers of logits know them.
cdef struct Row:
    const char *data
    Py_ssize_t n
    int kind
    const int64_t *patch_ids      # ascending
    const double *patch_values
    Py_ssize_t patches

# Opens any array_like; returns the object that keeps the memory alive.
cdef object open_row(object values, str name, Row *row)

# The array to write n results to: `out` after its checks, or a fresh float64 one. The inputs are
# what it must not overlap.
cdef cnp.ndarray open_out(object out, Py_ssize_t n, tuple inputs, bint float32_too=*)

# An array or an array of another library on the CPU, of whatever dtype, without a copy.
cdef object imported(object values, str name)

# Whether a dtype is bfloat16, of whatever origin.
cdef bint is_bfloat16(object dtype)

# Rows as they are given, as an array; sequences of rows stay what they are.
cdef object as_rows_array(object rows, str name)

# The error to raise for a row that is not one of probabilities.
cdef object bad_probabilities(object row, str name)

cdef cnp.ndarray new_doubles(Py_ssize_t n)
cdef cnp.ndarray new_ids(Py_ssize_t n)

# An argument as a number, TypeError with its name where it is none; text is none, though float() reads it.
cdef double real(object value, str name) except? -1.0
cdef object integer(object value, str name)

# An id as given, for a row of n: IndexError outside [0, n).
cdef int64_t id_within(object token_id, Py_ssize_t n) except -1

# Ranks that top_k keeps of n; 0 when it is off.
cdef Py_ssize_t ranks_kept(object top_k, Py_ssize_t n) except -1


cdef inline int64_t *ids_of(cnp.ndarray array) noexcept nogil:
    return <int64_t *>cnp.PyArray_DATA(array)


cdef inline double *doubles(cnp.ndarray array) noexcept nogil:
    return <double *>cnp.PyArray_DATA(array)


# The number at i, patches aside.
cdef inline double element(const Row *row, Py_ssize_t i) noexcept nogil:
    cdef float wide
    if row.kind == F64:
        return (<const double *>row.data)[i]
    if row.kind == F32:
        return (<const float *>row.data)[i]
    if row.kind == F16:
        table.widen_f16(<const uint16_t *>row.data + i, &wide, 1)
    else:
        table.widen_bf16(<const uint16_t *>row.data + i, &wide, 1)
    return wide


# The CHUNK at start as float64 with its patches, or 0 and how many elements follow without one.
cdef Py_ssize_t patched_chunk(const Row *row, Py_ssize_t start, double *buffer,
                              Py_ssize_t *free) noexcept nogil

# The logit at i.
cdef double logit(const Row *row, Py_ssize_t i) noexcept nogil


# The next piece of a row of logits as float32 or float64: as much as lies there in that type, else a
# CHUNK of it in the buffer. `start` is a multiple of CHUNK, and so is the length short of the row's end.
cdef inline Py_ssize_t logits_piece(const Row *row, Py_ssize_t start, double *buffer, const void **piece,
                                    bint *single) noexcept nogil:
    cdef Py_ssize_t length = row.n - start, patched
    if row.patches:
        patched = patched_chunk(row, start, buffer, &length)
        if patched:
            piece[0] = buffer
            single[0] = False
            return patched
    single[0] = row.kind != F64
    if row.kind == F64:
        piece[0] = <const double *>row.data + start
        return length
    if row.kind == F32:
        piece[0] = <const float *>row.data + start
        return length
    if length > CHUNK:
        length = CHUNK
    if row.kind == F16:
        table.widen_f16(<const uint16_t *>row.data + start, <float *>buffer, length)
    else:
        table.widen_bf16(<const uint16_t *>row.data + start, <float *>buffer, length)
    piece[0] = buffer
    return length


# The same as float64; at most `most` elements (a multiple of CHUNK) at a time.
cdef inline Py_ssize_t probs_piece(const Row *row, Py_ssize_t start, Py_ssize_t most, double *buffer,
                                   const double **piece) noexcept nogil:
    cdef float narrow[512]  # CHUNK
    cdef Py_ssize_t length = row.n - start
    if length > most:
        length = most
    if row.kind == F64:
        piece[0] = <const double *>row.data + start
        return length
    if length > CHUNK:
        length = CHUNK
    if row.kind == F32:
        table.widen_f32(<const float *>row.data + start, buffer, length)
    elif row.kind == F16:
        table.widen_f16(<const uint16_t *>row.data + start, narrow, length)
        table.widen_f32(narrow, buffer, length)
    else:
        table.widen_bf16(<const uint16_t *>row.data + start, narrow, length)
        table.widen_f32(narrow, buffer, length)
    piece[0] = buffer
    return length
