"""One distribution at one position of a block, however it is given.

Design: a row of logits becomes as little as its use asks for. With top-k on it is a support of at most k
tokens. Without truncation it stays a row of logits: the accept test needs one exponential and the sum of
all, which is rough (float32) until a decision is closer than its error; a draw needs one pass of float64
exponentials summed by blocks, of which one is walked. With top-p alone the row is written once, into
memory that the worker keeps. All give the numbers that `distributions_from_logits` gives, bit for bit.
"""

from libc.math cimport INFINITY, isfinite
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from mtplx._csampling.acceptance cimport draw_difference, weigh_correction
from mtplx._csampling.arrays cimport F64, Row, element, logit, logits_piece
from mtplx._csampling.dispatch cimport (
    BLOCK,
    CATEGORICAL_DRAW,
    CHUNK,
    SCALE_NONE,
    SCALE_RECIPROCAL,
    SIDE_BY_SIDE,
    count_fallback,
    running,
    streamed,
    table,
)
from mtplx._csampling.distributions cimport find, normalise
from mtplx._csampling.draws cimport Weights, draw, draw_place, weigh, weigh_quotients
from mtplx._csampling.mass cimport ROW_FINE, weigh_row
from mtplx._csampling.selection cimport (
    BAD_LOGIT,
    NO_MEMORY,
    SELECTED,
    TOO_MANY,
    Candidate,
    Candidates,
    best_logits,
    block_pass,
    few,
    rough_error,
    selection_status,
    sort_candidates,
    weigh_one,
)
from mtplx._csampling.softmax cimport exponentials, first_at, largest_logit, set_scaling
from mtplx._csampling.streams cimport Stream, next_uniform
from mtplx._csampling.truncation cimport order_by_id, whole_row_into

cdef double UNIT = 2.0 ** -53
cdef double ONE = 1.0

# Shorter rows are not worth streaming.
cdef enum:
    STREAM_FROM = 2048


# ---- memory --------------------------------------------------------------------------------------


cdef void free_workspace(Workspace *space) noexcept nogil:
    cdef int slot
    for slot in range(2):
        free(space.dense[slot])
        free(space.ids[slot])
        free(space.weights[slot])
    free(space.sums)
    memset(space, 0, sizeof(Workspace))


cdef double *dense_room(Workspace *space, int slot, Py_ssize_t n) noexcept nogil:
    if space.dense_room[slot] < n:
        free(space.dense[slot])
        space.dense[slot] = <double *>malloc(n * sizeof(double))
        space.dense_room[slot] = n if space.dense[slot] is not NULL else 0
    return space.dense[slot]


cdef double *sums_room(Workspace *space, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t blocks = (n + BLOCK - 1) // BLOCK
    if space.sums_room < blocks:
        free(space.sums)
        space.sums = <double *>malloc(blocks * sizeof(double))
        space.sums_room = blocks if space.sums is not NULL else 0
    return space.sums


cdef bint support_room(Workspace *space, int slot, Py_ssize_t count) noexcept nogil:
    if space.support_room[slot] < count:
        free(space.ids[slot])
        free(space.weights[slot])
        space.ids[slot] = <int64_t *>malloc(count * sizeof(int64_t))
        space.weights[slot] = <double *>malloc(count * sizeof(double))
        if space.ids[slot] is NULL or space.weights[slot] is NULL:
            space.support_room[slot] = 0
            return False
        space.support_room[slot] = count
    return True


# ---- from logits ---------------------------------------------------------------------------------


cdef problem resolve(const Row *logits, const Settings *settings, Workspace *space, int slot,
                     View *view) noexcept nogil:
    cdef Candidates best
    cdef selection_status status
    cdef double largest
    cdef double *dense
    view.n = logits.n
    view.any_id = settings.k > 0
    view.ascending = True
    view.tolerance = 0.0
    view.divisor = 1.0
    if settings.temperature <= 0.0:
        largest = largest_logit(logits)
        if not isfinite(largest):
            return BAD_LOGITS
        view.mode = POINT
        view.point = first_at(logits, largest)
        return FINE
    if settings.temperature < INFINITY:
        if settings.k and few(settings.k, logits.n):
            status = best_logits(logits, settings.temperature, settings.top_p, settings.k, &best)
            if status == SELECTED:
                if support_room(space, slot, best.count):
                    take_support(&best, space, slot, view)
                else:
                    status = NO_MEMORY
            free(best.items)
            if status != TOO_MANY:
                return FINE if status == SELECTED else (BAD_LOGITS if status == BAD_LOGIT else NO_ROOM)
        elif settings.k == 0 and settings.top_p >= 1.0 and logits.n >= STREAM_FROM:
            status = stream(logits, settings.temperature, view)
            if status != TOO_MANY:
                return FINE if status == SELECTED else (BAD_LOGITS if status == BAD_LOGIT else NO_ROOM)
    dense = dense_room(space, slot, logits.n)
    if dense is NULL:
        return NO_ROOM
    status = whole_row_into(logits, settings.temperature, settings.top_p, settings.k, dense)
    if status != SELECTED:
        return BAD_LOGITS if status == BAD_LOGIT else NO_ROOM
    view.mode = DENSE
    dense_view(view, dense)
    return FINE


cdef void dense_view(View *view, const double *dense) noexcept nogil:
    view.mode = DENSE
    view.row.data = <const char *>dense
    view.row.n = view.n
    view.row.kind = F64
    view.row.patches = 0
    view.divisor = 1.0


cdef void take_support(Candidates *best, Workspace *space, int slot, View *view) noexcept nogil:
    cdef Py_ssize_t i
    order_by_id(best)
    for i in range(best.count):
        space.ids[slot][i] = best.items[i].id
        space.weights[slot][i] = best.items[i].value
    normalise(space.weights[slot], best.count)
    view.mode = SPARSE
    view.support.ids = space.ids[slot]
    view.support.weights = space.weights[slot]
    view.support.count = best.count


cdef selection_status stream(const Row *logits, double temperature, View *view) noexcept nogil:
    """The largest logit and the rough sum; TOO_MANY where the row must be written after all."""
    cdef streamed run
    cdef Py_ssize_t blocks = (logits.n + CHUNK - 1) // CHUNK * SIDE_BY_SIDE
    cdef selection_status status
    cdef double *maxima = <double *>malloc(blocks * sizeof(double))
    if maxima is NULL:
        return NO_MEMORY
    status = block_pass(logits, temperature, True, maxima, &run)
    free(maxima)
    if status != SELECTED:
        return status
    set_scaling(&view.scaled, temperature, run.top)
    if view.scaled.rule != SCALE_NONE and view.scaled.rule != SCALE_RECIPROCAL:
        return TOO_MANY
    view.mode = STREAMED
    view.row = logits[0]
    view.total = run.sum
    view.tolerance = rough_error(logits.n, &view.scaled)
    return SELECTED


cdef void make_exact(View *view) noexcept nogil:
    if view.mode == STREAMED and view.tolerance > 0.0:
        view.total = exponentials(&view.row, &view.scaled, NULL)
        view.tolerance = 0.0


# ---- one probability -----------------------------------------------------------------------------


cdef problem probability(const View *view, int64_t token, Failure *failure, double *value) noexcept nogil:
    failure.token = token
    failure.n = view.n
    if (view.mode == DENSE or view.mode == STREAMED or not view.any_id) and not 0 <= token < view.n:
        return BAD_ID
    if view.mode == POINT:
        value[0] = 1.0 if token == view.point else 0.0
    elif view.mode == SPARSE:
        value[0] = find(&view.support, view.ascending, token)
    elif view.mode == STREAMED:
        value[0] = weigh_one(logit(&view.row, token), &view.scaled)
        table.divide_f64(value, 1, view.total, value)
    else:
        value[0] = element(&view.row, token)
        if not (value[0] >= 0.0 and isfinite(value[0])):
            failure.value = value[0]
            return BAD_VALUE
    return FINE


cdef problem largest_token(View *view, int64_t *token) noexcept nogil:
    cdef Py_ssize_t i
    cdef double best = -1.0, value, total
    if view.mode == POINT:
        token[0] = view.point
        return FINE
    if view.mode == SPARSE:
        for i in range(view.support.count):
            value = view.support.weights[i]
            if value > best or (value == best and view.support.ids[i] < token[0]):
                best = value
                token[0] = view.support.ids[i]
        return FINE
    if view.mode == STREAMED:
        return largest_streamed(view, token)
    if weigh_row(&view.row, &total) != ROW_FINE:
        return BAD_ROW
    token[0] = first_at(&view.row, largest_logit(&view.row))
    return FINE


cdef problem largest_streamed(View *view, int64_t *token) noexcept nogil:
    """The first rank under the softmax: logits whose probabilities round to the same number tie."""
    cdef Candidates best
    cdef selection_status status = best_logits(&view.row, view.scaled.temperature, INFINITY, 1, &best)
    cdef Py_ssize_t i
    cdef double value
    if status == SELECTED:
        token[0] = best.items[0].id
    free(best.items)
    if status != TOO_MANY:
        return FINE if status == SELECTED else NO_ROOM
    # Ties beyond counting: the first whose probability is the largest logit's.
    make_exact(view)
    for i in range(view.n):
        value = weigh_one(logit(&view.row, i), &view.scaled)
        table.divide_f64(&value, 1, view.total, &value)
        if value == 1.0 / view.total:
            token[0] = i
            return FINE
    return NO_ROOM


# ---- draws ---------------------------------------------------------------------------------------


cdef problem draw_token(View *view, Workspace *space, const Stream *stream, uint64_t lane,
                        int64_t *token) noexcept nogil:
    cdef Weights weights
    cdef double *sums
    cdef double u
    if view.mode == POINT:
        next_uniform(stream, lane)
        token[0] = view.point
    elif view.mode == SPARSE:
        u = next_uniform(stream, lane)
        token[0] = view.support.ids[draw_place(view.support.weights, view.support.count, u)]
    else:
        sums = sums_room(space, view.n)
        if sums is NULL:
            return NO_ROOM
        if view.mode == STREAMED:
            token[0] = draw_streamed(view, sums, next_uniform(stream, lane))
        else:
            if not weigh(&weights, &view.row, NULL, False, sums):
                return BAD_ROW
            token[0] = draw(&weights, next_uniform(stream, lane))
    return FINE


cdef Py_ssize_t draw_streamed(View *view, double *sums, double u) noexcept nogil:
    """A draw from the softmax of a row of logits.

    The exponentials are summed by blocks; their sums are the probabilities' times the total, up to one
    rounding each, so the certificate of `draws` holds with one more rounding for each entry.
    """
    cdef double buffer[CHUNK]
    cdef double weights[CHUNK]
    cdef Py_ssize_t n = view.n, start = 0, length, chunk, block, blocks = (n + BLOCK - 1) // BLOCK, i
    cdef double total = 0.0, before = 0.0, cumulative, target, tolerance
    for chunk in range((n + CHUNK - 1) // CHUNK):
        exponentials_of(view, chunk * CHUNK, buffer, weights, &length)
        table.block_sums(weights, length, sums + 2 * chunk)
    for block in range(blocks):
        total += sums[block]
    target = u * total
    tolerance = (3.0 * n + 16.0) * UNIT * total
    block = 0
    while block < blocks - 1 and before + sums[block] <= target - tolerance:
        before += sums[block]
        block += 1
    start = block * BLOCK
    cumulative = before
    while start < n:
        exponentials_of(view, start // CHUNK * CHUNK, buffer, weights, &length)
        for i in range(start % CHUNK, length):
            before = cumulative
            cumulative += weights[i]
            if cumulative > target:
                if cumulative - target > tolerance and (before == 0.0 or target - before > tolerance):
                    return start // CHUNK * CHUNK + i
                return replay_streamed(view, u)
        start = start // CHUNK * CHUNK + length
    return replay_streamed(view, u)


cdef void exponentials_of(const View *view, Py_ssize_t start, double *buffer, double *out,
                          Py_ssize_t *length) noexcept nogil:
    """Exponentials of one CHUNK of a streamed row."""
    cdef const void *piece
    cdef bint single
    cdef Row part = view.row
    cdef running ignored
    memset(&ignored, 0, sizeof(ignored))
    part.n = min(view.n, start + CHUNK)
    length[0] = logits_piece(&part, start, buffer, &piece, &single)
    if single:
        table.exp_f32(<const float *>piece, length[0], &view.scaled, out, &ignored)
    else:
        table.exp_f64(<const double *>piece, length[0], &view.scaled, out, &ignored)


cdef Py_ssize_t replay_streamed(View *view, double u) noexcept nogil:
    """The draw by its definition: sequential sums of the probabilities, which are never all in memory."""
    cdef double buffer[CHUNK]
    cdef double weights[CHUNK]
    cdef Py_ssize_t n = view.n, start, length, i
    cdef double total = 0.0, cumulative = 0.0
    count_fallback(CATEGORICAL_DRAW)
    make_exact(view)
    start = 0
    while start < n:
        exponentials_of(view, start, buffer, weights, &length)
        table.divide_f64(weights, length, view.total, weights)
        for i in range(length):
            total += weights[i]
        start += length
    start = 0
    while start < n:
        exponentials_of(view, start, buffer, weights, &length)
        table.divide_f64(weights, length, view.total, weights)
        for i in range(length):
            cumulative += weights[i]
            if cumulative / total > u:
                return start + i
        start += length
    return n - 1  # not reached: the last cumulative sum is the total, and u < 1


# ---- corrections ---------------------------------------------------------------------------------


cdef bint write_dense(View *view, Workspace *space, int slot) noexcept nogil:
    """Turn any view into a dense one."""
    cdef double *dense
    cdef Py_ssize_t i
    if view.mode == DENSE:
        return True
    dense = dense_room(space, slot, view.n)
    if dense is NULL:
        return False
    if view.mode == STREAMED:
        # Divided where they are read: a pass over the row less.
        view.total = exponentials(&view.row, &view.scaled, dense)
        dense_view(view, dense)
        view.divisor = view.total
        return True
    else:
        memset(dense, 0, view.n * sizeof(double))
        if view.mode == POINT:
            if 0 <= view.point < view.n:
                dense[view.point] = 1.0
        else:
            for i in range(view.support.count):
                dense[view.support.ids[i]] = view.support.weights[i]
    dense_view(view, dense)
    return True


cdef void divide_out(View *view) noexcept nogil:
    if view.divisor != 1.0:
        table.divide_f64(<const double *>view.row.data, view.n, view.divisor, <double *>view.row.data)
        view.divisor = 1.0


cdef bint ascend(View *view, Workspace *space, int slot) noexcept nogil:
    """Bring a support into ascending order, in the workspace; a point is one."""
    cdef Candidate *items
    cdef Py_ssize_t i
    if view.mode == POINT:
        view.support.ids = &view.point
        view.support.weights = &ONE
        view.support.count = 1
        return True
    if view.ascending:
        return True
    items = <Candidate *>malloc(view.support.count * sizeof(Candidate))
    if items is NULL or not support_room(space, slot, view.support.count):
        free(items)
        return False
    for i in range(view.support.count):
        items[i].id = view.support.ids[i]
        items[i].value = view.support.weights[i]
        items[i].weight = -<double>items[i].id
    sort_candidates(items, view.support.count)
    for i in range(view.support.count):
        space.ids[slot][i] = items[i].id
        space.weights[slot][i] = items[i].value
    free(items)
    view.support.ids = space.ids[slot]
    view.support.weights = space.weights[slot]
    view.ascending = True
    return True


cdef problem prepare_correction(View *target, View *draft, Workspace *space,
                                Prepared *prepared) noexcept nogil:
    cdef Weights weights
    cdef double *sums
    prepared.sparse = (target.mode == SPARSE or target.mode == POINT) and (
        draft.mode == SPARSE or draft.mode == POINT)
    if prepared.sparse:
        if not (ascend(target, space, 0) and ascend(draft, space, 1)):
            return NO_ROOM
        prepared.target = target.support
        prepared.draft = draft.support
        return FINE
    sums = sums_room(space, target.n)
    if sums is NULL or not (write_dense(target, space, 0) and write_dense(draft, space, 1)):
        return NO_ROOM
    prepared.p = target.row
    prepared.q = draft.row
    if target.divisor != 1.0 or draft.divisor != 1.0:
        if target.row.kind != F64 or draft.row.kind != F64 or not weigh_quotients(
                &weights, &prepared.p, &prepared.q, target.divisor, draft.divisor, sums):
            # No difference is positive (or rows of two kinds): the probabilities themselves.
            divide_out(target)
            divide_out(draft)
            if not weigh_correction(&weights, &prepared.p, &prepared.q, sums):
                return WITHOUT_MASS
    elif not weigh_correction(&weights, &prepared.p, &prepared.q, sums):
        return WITHOUT_MASS
    prepared.p_divisor = weights.p_divisor
    prepared.q_divisor = weights.q_divisor
    prepared.residual = weights.q is not NULL
    prepared.positive_part = weights.positive_part
    prepared.scale = weights.scale
    prepared.total = weights.total
    prepared.sums = sums
    return FINE


cdef int64_t draw_correction(const Prepared *prepared, double u) noexcept nogil:
    cdef Weights weights
    if prepared.sparse:
        return draw_difference(&prepared.target, &prepared.draft, u)
    weights.p = &prepared.p
    weights.q = &prepared.q if prepared.residual else NULL
    weights.p_divisor = prepared.p_divisor
    weights.q_divisor = prepared.q_divisor
    weights.positive_part = prepared.positive_part
    weights.scale = prepared.scale
    weights.total = prepared.total
    weights.sums = prepared.sums
    return draw(&weights, u)
