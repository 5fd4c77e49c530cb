"""The rows of a block of drafts, opened one by one when a rule reaches them.

Design: a block is a plain struct. Rows of a matrix or of a batch are addresses, so that a whole range of
sequences runs without the GIL; rows of a Python sequence are fetched with it. An error is noted in the
block and raised when the GIL is held again.
"""

cimport cython
cimport numpy as cnp
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t
from libc.string cimport memmove

from mtplx._csampling.arrays cimport F64, Row, element, integer, open_row
from mtplx._csampling.distributions cimport SparseDistributionBase, require_support
from mtplx._csampling.views cimport (
    BAD_PENALTY_ID,
    DENSE,
    FINE,
    POINT,
    RAISED,
    SPARSE,
    Settings,
    View,
    Workspace,
    STREAMED,
    problem,
    resolve,
    stream_again,
)

cnp.import_array()

DEFERRALS = {"tokenv1": BY_DRAFT, "tokenv2": BY_TARGET, "tokenv3": BY_TARGET_RATIO}


# ---- rows, as they are reached ---------------------------------------------------------------------


cdef problem note_exception(Block *block, object error) noexcept:
    Py_INCREF(error)
    block.failure.error = <void *>error
    return RAISED


@cython.boundscheck(True)  # the caller's lists may shrink meanwhile
cdef problem open_object(Block *block, const Side *side, Py_ssize_t i, View *view, Row *logits) noexcept:
    """Row i of a Python sequence: a distribution, or a row of logits where `logits` is given.

    It is asked for once, however often a rule looks at it; so is the copy of a row that is not in order.
    """
    cdef SparseDistributionBase sparse
    cdef dict opened = <dict>side.opened
    cdef Row *to = logits or &view.row
    cdef int kind = F64  # of a row of numbers
    try:
        held = opened.get(i)
        row = (<object>side.rows)[i] if held is None else held[0]
        if logits is NULL and isinstance(row, SparseDistributionBase):
            sparse = require_support(row)
            view.mode = SPARSE
            view.n = sparse.vocab_size
            view.any_id = True
            view.ascending = sparse.ascending
            view.support = sparse.support()
        else:
            if held is None:
                name = "logits" if logits is not NULL else "draft_q" if block.failure.of_draft else "target_p"
                row = open_row(row, name, to)
                kind = to.kind
            else:
                to.kind = held[1]
                to.data = <const char *>cnp.PyArray_DATA(<cnp.ndarray>row)
                to.n = cnp.PyArray_DIM(<cnp.ndarray>row, 0)
                to.patches = 0
            if logits is NULL:
                view.mode = DENSE
                view.any_id = False
                view.n = view.row.n
        if held is None:
            opened[i] = row, kind
        return FINE
    except BaseException as error:  # a KeyboardInterrupt in the caller's code too
        return note_exception(block, error)


cdef problem open_given(Block *block, const Side *side, Py_ssize_t i, View *view) noexcept nogil:
    """Row i of probabilities."""
    cdef Py_ssize_t j
    view.tolerance = 0.0
    if side.kind == MATRIX:
        view.mode = DENSE
        view.any_id = False
        view.row = side.first
        view.row.data += i * side.stride
        view.n = side.first.n
    elif side.kind == BATCH:
        view.mode = SPARSE
        view.any_id = True
        view.n = side.vocab_size
        view.support.ids = side.ids + i * side.width
        view.support.weights = side.probs + i * side.width
        view.support.count = 0
        view.ascending = True
        while view.support.count < side.width and view.support.ids[view.support.count] >= 0:
            j = view.support.count
            view.ascending = view.ascending and (j == 0 or view.support.ids[j - 1] < view.support.ids[j])
            view.support.count += 1
    else:
        with gil:
            return open_object(block, side, i, view, NULL)
    return FINE


cdef problem open_target(Block *block, Workspace *space, Py_ssize_t i, View *view) noexcept nogil:
    cdef Row logits
    cdef problem status
    block.failure.row = i
    block.failure.of_draft = False
    if not block.from_logits:
        return open_given(block, &block.target, i, view)
    status = open_logits(block, &block.target, i, &logits)
    if status != FINE:
        return status
    status = check_penalised(block, i, logits.n)
    if status != FINE:
        return status
    patch(&block.penalties, i, &logits)
    return resolve_row(block, i, &logits, &block.target_settings, space, 0, view)


cdef problem open_draft(Block *block, Workspace *space, Py_ssize_t i, const View *target, int64_t token,
                        View *view) noexcept nogil:
    cdef Row logits
    cdef problem status
    block.failure.row = i
    block.failure.of_draft = True
    if block.draft.kind == POINTS:
        view.mode = POINT
        view.n = target.n
        view.any_id = False
        view.ascending = True
        view.point = token
        view.tolerance = 0.0
        return FINE
    if not block.from_logits:
        return open_given(block, &block.draft, i, view)
    status = open_logits(block, &block.draft, i, &logits)
    if status != FINE:
        return status
    return resolve_row(block, i, &logits, &block.draft_settings, space, 1, view)


cdef problem resolve_row(Block *block, Py_ssize_t i, const Row *logits, const Settings *settings,
                         Workspace *space, int slot, View *view) noexcept nogil:
    """Rows of a sequence may differ in length: whether top-k is off is a question of each."""
    cdef Settings own = settings[0]
    cdef KeptSum *kept = NULL
    cdef problem status
    if block.sums is not NULL and i < block.drafts:
        kept = block.sums + slot * block.drafts + i
        if kept.total > 0.0:
            stream_again(logits, &kept.scaled, kept.total, view)
            return FINE
    if own.k >= logits.n:
        own.k = 0
    status = resolve(logits, &own, space, slot, view)
    if status == FINE and kept is not NULL and view.mode == STREAMED:
        kept.scaled = view.scaled
        kept.total = view.total
    return status


cdef problem open_logits(Block *block, const Side *side, Py_ssize_t i, Row *logits) noexcept nogil:
    if side.kind == MATRIX:
        logits[0] = side.first
        logits.data += i * side.stride
        return FINE
    with gil:
        return open_object(block, side, i, NULL, logits)


cdef problem read_token(Block *block, Py_ssize_t i, int64_t *token) noexcept nogil:
    if block.unreadable is NULL or not block.unreadable[i]:
        token[0] = block.tokens[i]
        return FINE
    block.failure.row = i
    with gil:
        return read_token_object(block, i, token)


@cython.boundscheck(True)  # the caller's lists may shrink meanwhile
cdef problem read_token_object(Block *block, Py_ssize_t i, int64_t *token) noexcept:
    try:
        index = integer((<object>block.given_tokens)[i], "a token id")
        # Out of any vocabulary: -1 stands for all of these.
        token[0] = index if 0 <= index < (1 << 62) else -1
        return FINE
    except BaseException as error:  # a KeyboardInterrupt in the caller's code too
        return note_exception(block, error)


# ---- penalties -------------------------------------------------------------------------------------


cdef problem check_penalised(Block *block, Py_ssize_t row, Py_ssize_t n) noexcept nogil:
    """No penalty of an id that a row of n logits has not."""
    cdef const Penalties *penalties = &block.penalties
    cdef int64_t largest = -1
    cdef Py_ssize_t start, end
    if penalties.filled:
        largest = penalties.ids[penalties.filled - 1]
    if penalties.overlay_starts is not NULL:
        start = penalties.overlay_starts[row if penalties.overlay_each else 0]
        end = penalties.overlay_starts[(row if penalties.overlay_each else 0) + 1]
        if end > start:
            largest = max(largest, penalties.overlay_ids[end - 1])
    if largest < n:
        return FINE
    block.failure.token = largest
    block.failure.n = n
    return BAD_PENALTY_ID


cdef void patch(const Penalties *penalties, Py_ssize_t row, Row *logits) noexcept nogil:
    cdef Py_ssize_t i = 0, j = 0, end = 0, filled = 0
    cdef int64_t token
    cdef double value, count
    logits.patches = 0
    if penalties.overlay_starts is not NULL:
        j = penalties.overlay_starts[row if penalties.overlay_each else 0]
        end = penalties.overlay_starts[(row if penalties.overlay_each else 0) + 1]
    while i < penalties.filled or j < end:
        if j >= end or (i < penalties.filled and penalties.ids[i] <= penalties.overlay_ids[j]):
            token = penalties.ids[i]
        else:
            token = penalties.overlay_ids[j]
        if token >= logits.n:
            break
        value = element(logits, token)
        if i < penalties.filled and penalties.ids[i] == token:
            count = penalties.counts[i]
            value -= penalties.frequency * count + penalties.presence * (count > 0.0)
            i += 1
        if j < end and penalties.overlay_ids[j] == token:
            value -= penalties.overlays[j]
            j += 1
        penalties.patch_ids[filled] = token
        penalties.patches[filled] = value
        filled += 1
    logits.patch_ids = penalties.patch_ids
    logits.patch_values = penalties.patches
    logits.patches = filled


cdef void count_draft(Penalties *penalties, int64_t token) noexcept nogil:
    cdef Py_ssize_t i = 0
    if penalties.presence == 0.0 and penalties.frequency == 0.0:
        return
    while i < penalties.filled and penalties.ids[i] < token:
        i += 1
    if i < penalties.filled and penalties.ids[i] == token:
        penalties.counts[i] += 1.0
        return
    memmove(penalties.ids + i + 1, penalties.ids + i, (penalties.filled - i) * sizeof(int64_t))
    memmove(penalties.counts + i + 1, penalties.counts + i, (penalties.filled - i) * sizeof(double))
    penalties.ids[i] = token
    penalties.counts[i] = 1.0
    penalties.filled += 1


cdef void discount_draft(Penalties *penalties, int64_t token) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(penalties.filled):
        if penalties.ids[i] == token:
            penalties.counts[i] -= 1.0  # a count of 0 changes nothing
