from libc.stdint cimport int64_t, uint64_t

from mtplx._csampling.arrays cimport Row
from mtplx._csampling.dispatch cimport scaling
from mtplx._csampling.distributions cimport Support
from mtplx._csampling.streams cimport Stream

# What can go wrong at one row. The caller says which row it was.
cdef enum problem:
    FINE
    NO_ROOM          # memory
    BAD_ID           # a token outside a dense row
    BAD_PENALTY_ID   # a penalty or an overlay of a token outside the row
    BAD_VALUE        # p(x) or q(x) negative or not finite
    NOT_DRAWABLE     # q(x) = 0 < p(x), where that is checked
    BAD_LENGTH       # target and draft row differ in length
    BAD_ROW          # a row that is drawn from has a negative or non-finite entry
    WITHOUT_MASS     # neither the residual nor the target has mass, or a row has none
    BAD_LOGITS       # NaN, +inf, or nothing above -inf
    RAISED           # an exception of the caller's own objects, kept in Failure.error

cdef struct Failure:
    problem what
    bint of_draft
    Py_ssize_t row
    int64_t token
    double value
    Py_ssize_t n         # lengths of target and draft row
    Py_ssize_t m
    void *error          # a reference that is owned, or NULL

cdef enum view_mode:
    DENSE      # a row of probabilities
    SPARSE     # a support
    POINT      # all mass on one token
    STREAMED   # a row of logits without truncation, whose probabilities are not written

# One distribution, however it is given.
cdef struct View:
    view_mode mode
    Py_ssize_t n          # vocabulary
    bint any_id           # an id outside the vocabulary has probability 0; else it is an error
    bint ascending        # of a support
    Row row               # DENSE: probabilities; STREAMED: logits
    Support support
    int64_t point
    scaling scaled        # STREAMED
    double total          # STREAMED: sum of the exponentials
    double tolerance      # STREAMED: relative error of the total; 0 once it is exact

# A configuration with its penalties taken out.
cdef struct Settings:
    double temperature
    double top_p          # >= 1: off
    Py_ssize_t k          # 0: off
    bint gather           # whether the nucleus of top-p alone may be a support

# Memory that a worker uses row after row. One slot for the target's row, one for the draft's.
cdef struct Workspace:
    double *dense[2]
    Py_ssize_t dense_room[2]
    int64_t *ids[2]
    double *weights[2]
    Py_ssize_t support_room[2]
    double *sums
    Py_ssize_t sums_room

cdef void free_workspace(Workspace *space) noexcept nogil

# Room for a row in a slot, for the sums of its blocks; NULL without memory.
cdef double *dense_room(Workspace *space, int slot, Py_ssize_t n) noexcept nogil
cdef double *sums_room(Workspace *space, Py_ssize_t n) noexcept nogil

# Turn a view that is not STREAMED into a dense one, in a slot of the workspace.
cdef bint write_dense(View *view, Workspace *space, int slot) noexcept nogil

# A support in ascending order, of a view that is one or a point.
cdef bint ascend(View *view, Workspace *space, int slot) noexcept nogil

# The distribution of a row of logits, patches and all.
cdef problem resolve(const Row *logits, const Settings *settings, Workspace *space, int slot,
                     View *view) noexcept nogil

# p(x); as exact as the view is.
cdef problem probability(const View *view, int64_t token, Failure *failure, double *value) noexcept nogil

# Replace the rough sum of a streamed row by softmax's own.
cdef void make_exact(View *view) noexcept nogil

# A draw from a distribution; its row is checked before the uniform is taken.
cdef problem draw_token(View *view, Workspace *space, const Stream *stream, uint64_t lane,
                        int64_t *token) noexcept nogil

# A correction: prepare checks and sums what it is drawn from, so that nothing fails after the coin.
cdef struct Prepared:
    View target
    View draft
    Workspace *space   # where at least one is a row
    double *sums
    bint streamed      # at least one is STREAMED, and nothing is summed yet
    double scale       # of two rows: as in draws.Weights
    double total
    bint residual
    bint positive_part

cdef problem prepare_correction(View *target, View *draft, Workspace *space,
                                Prepared *prepared) noexcept nogil
cdef int64_t draw_correction(Prepared *prepared, double u) noexcept nogil

# The token of largest probability, the lowest id among equals.
cdef problem largest_token(View *view, int64_t *token) noexcept nogil
