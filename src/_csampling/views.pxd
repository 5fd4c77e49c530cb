from libc.stdint cimport int64_t, uint64_t

from mtplx._csampling.arrays cimport Row
from mtplx._csampling.dispatch cimport running, scaling
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
    bint exact            # whether streamed rows need the exact sum from the start

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

cdef inline bint is_support(const View *view) noexcept nogil:
    return view.mode == SPARSE or view.mode == POINT

# A support in ascending order, of a view that is one or a point; other views stay what they are.
cdef bint ascend(View *view, Workspace *space, int slot) noexcept nogil

# Place of the first entry at or behind an id, in a support that ascends.
cdef Py_ssize_t first_in(const Support *support, int64_t id) noexcept nogil

# The distribution of a row of logits, patches and all.
cdef problem resolve(const Row *logits, const Settings *settings, Workspace *space, int slot,
                     View *view) noexcept nogil

# A streamed row as it was resolved before, with its exact sum.
cdef void stream_again(const Row *logits, const scaling *scaled, double total, View *view) noexcept nogil

# p(x); as exact as the view is.
cdef problem probability(const View *view, int64_t token, Failure *failure, double *value) noexcept nogil

# Replace the rough sum of a streamed row by softmax's own.
cdef void make_exact(View *view) noexcept nogil

# A draw from a distribution; its row is checked before the uniform is taken.
cdef problem draw_token(View *view, Workspace *space, const Stream *stream, uint64_t lane,
                        int64_t *token) noexcept nogil

# The next CHUNK of a view's probabilities, in the row itself or in the buffer; returns its length. Supports
# have to ascend.
cdef Py_ssize_t probabilities_of(const View *view, Py_ssize_t start, double *buffer,
                                 const double **piece) noexcept nogil

# The same, but of a streamed row the exponentials, which are added to the total as softmax adds them.
cdef Py_ssize_t terms_of(const View *view, Py_ssize_t start, double *buffer, const double **piece,
                         running *total) noexcept nogil

# What a correction is drawn from. The last two are a cascade's; r is whether a token is deferred.
cdef enum correction_part:
    WHOLE            # p
    ABOVE            # (factor p - q)+
    ABOVE_DEFERRED   # (factor p - r q)+
    EMITTED          # factor p + (1 - r) q

# The weights of a correction, which are computed a CHUNK at a time where one of the pair is a row.
cdef struct Correction:
    View p
    View q              # not looked at where the part is WHOLE
    bint sparse         # both are supports, which ascend
    bint summed         # whether total is known
    correction_part part
    double factor
    bint by_draft       # r: whether q, else p, is below the bound
    double bound
    double scale        # 1, or what keeps the sum of two rows from overflowing
    double total        # of supports by ascending id, one by one; of rows by blocks
    double *sums        # of rows, one per BLOCK

# A pair of views and a factor; supports are summed up, WHOLE where none of it is positive.
cdef problem open_correction(View *target, View *draft, double factor, Workspace *space,
                             Correction *left) noexcept nogil

# The sums of two rows' weights, scale and total; False without mass.
cdef bint sum_up(Correction *left) noexcept nogil

# All of that with factor 1, WHOLE where nothing is left, so that nothing fails after the coin. Streamed rows,
# which have mass, are summed up only when a draw needs it.
cdef problem prepare_correction(View *target, View *draft, Workspace *space,
                                Correction *left) noexcept nogil
cdef int64_t draw_correction(Correction *left, double u) noexcept nogil

# The sum of two rows' weights by ascending id, one by one.
cdef double sequential_sum(const Correction *left) noexcept nogil

# The token of largest probability, the lowest id among equals.
cdef problem largest_token(View *view, int64_t *token) noexcept nogil
