from mtplx._csampling.arrays cimport Row
from mtplx._csampling.selection cimport Candidates, selection_status

# Leaves the candidates in ascending id order, their weight in `value`.
cdef void order_by_id(Candidates *best) noexcept nogil

# softmax and the truncation, densely, by the whole row; T > 0 or one-hot.
cdef selection_status whole_row_into(const Row *row, double temperature, double top_p, Py_ssize_t k,
                                     double *out) noexcept nogil

# top_p as the selection takes it: infinite outside (0, 1). ValueError if it is NaN.
cdef double nucleus_mass(double top_p) except -1.0
