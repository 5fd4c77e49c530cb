"""Trees of drafts, verified in one call.

Design: a `Step` is one node whose children are being tested; it holds what earlier rejections left of p
(and, without replacement, of q). What is left over, D = (P p - q)+, is written only when the next rejection
needs it: a draw needs the sums of its blocks, a test a single entry, and both are computed from the two
rows. Sums that the rule divides by are those of `mtplx.reference.trees.mass`: the kernels sum in that very
order, so every threshold has the reference's bits and nothing has to be certified but draws.

Memory: two rows for each node of the path that is followed, at most.
"""

import numpy as np

cimport numpy as cnp
from cpython.ref cimport Py_XDECREF, PyObject
from libc.math cimport INFINITY, isfinite, isinf, nextafter
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from mtplx._csampling.acceptance cimport acceptance
from mtplx._csampling.arrays cimport F64, Row, bad_probabilities, element, ids_of
from mtplx._csampling.blocks cimport Block, Side, open_given
from mtplx._csampling.dispatch cimport BLOCK, CHUNK, table
from mtplx._csampling.distributions cimport Support, find, normalise
from mtplx._csampling.draws cimport (
    Weights,
    bitgen_of,
    divide_parts,
    draw,
    draw_place,
    weigh,
    weigh_scaled,
    weights_piece,
)
from mtplx._csampling.mass cimport OVERFLOW_SCALE, ROW_FINE, weigh_row, widen_into
from mtplx._csampling.rules cimport keep_probability, prefix_acceptance
from mtplx._csampling.streams cimport BONUS_LANE, CORRECTION_LANE, next_uniform
from mtplx._csampling.verification cimport open_side
from mtplx._csampling.views cimport (
    BAD_ID,
    BAD_LENGTH,
    BAD_ROW,
    BAD_VALUE,
    DENSE,
    FINE,
    NO_ROOM,
    NOT_DRAWABLE,
    POINT,
    RAISED,
    SPARSE,
    WITHOUT_MASS,
    Failure,
    View,
    Workspace,
    ascend,
    draw_token,
    free_workspace,
    probability,
    problem,
)

cnp.import_array()

cdef uint64_t NODE_LANE = 1 << 33

cdef enum tree_rule:
    RECURSIVE
    KSEQ
    TRAVERSAL

cdef dict RULES = {"recursive": RECURSIVE, "kseq": KSEQ, "traversal": TRAVERSAL}

# What a token is drawn from when the path ends here.
cdef enum ending:
    FROM_TARGET     # the target's row as given
    FROM_LEFT       # what the last rejection left
    FROM_POSITIVE   # the positive part of p, nothing having been left

# Memory of a step, kept for the next node at its depth.
cdef struct Room:
    double *p
    double *q
    double *sums
    Py_ssize_t p_room
    Py_ssize_t q_room
    Py_ssize_t sums_room
    int64_t *ids[3]       # of a sparse pair: p; what is left; what will be left
    double *weights[3]
    int64_t *q_ids
    double *q_weights
    Py_ssize_t support_room
    Py_ssize_t q_support_room

# A node, some of whose children were rejected. Rows point into the struct, so a step never moves.
cdef struct Step:
    Py_ssize_t node
    Py_ssize_t next_child    # -1: none is left to be tested
    double reach             # P
    bint has_rows
    View target
    View draft
    bint sparse
    bint draft_gone          # used up by children without replacement
    bint changed             # p is no longer the target's row
    ending end
    # dense
    bint rows_ready
    Row p                    # to be divided by p_divisor
    Row q
    double p_divisor
    double q_divisor
    bint q_divided           # the draft's row has been written anew
    Weights left             # once changed: D; q is NULL where it is written, into p
    double left_mass
    # sparse
    Support p_support        # ascending
    Support left_support     # undivided
    Support q_support        # in the order of storage
    bint q_ascending
    # kseq
    double division
    double rounds
    Room room

cdef struct Tree:
    Block block              # both sides, the stream, what failed
    tree_rule rule
    bint replacement
    Py_ssize_t nodes
    const int64_t *tokens
    Py_ssize_t *first_child  # of row i: the context, then the nodes; -1 without children
    Py_ssize_t *next_sibling
    Py_ssize_t *children     # how many, by row
    Step *steps
    Py_ssize_t step_count
    Workspace space
    int64_t *out             # one more than the longest path has nodes
    int64_t *path
    Py_ssize_t accepted
    bint bonus


# ---- sums and rows ---------------------------------------------------------------------------------


cdef double mass_of(const double *values, Py_ssize_t n) noexcept nogil:
    cdef bint ignored
    return checked_mass(values, n, &ignored)


cdef double checked_mass(const double *values, Py_ssize_t n, bint *bad) noexcept nogil:
    """The sum of `mtplx.reference.trees.mass`, and whether an entry is negative or NaN."""
    cdef double sums[2]
    cdef double total = 0.0
    cdef Py_ssize_t i, length
    bad[0] = False
    if n <= BLOCK:
        for i in range(n):
            total += values[i]
            bad[0] = bad[0] or not values[i] >= 0.0
        return total
    i = 0
    while i < n:
        length = min(<Py_ssize_t>CHUNK, n - i)
        bad[0] = table.block_sums(values + i, length, sums) or bad[0]
        total += sums[0]
        if length > BLOCK:
            total += sums[1]
        i += length
    return total


cdef double mass_left(const Weights *left) noexcept nogil:
    """The same of weights whose blocks were summed."""
    cdef double buffer[CHUNK]
    cdef double other[CHUNK]
    cdef const double *piece
    if left.p.n > BLOCK:
        return left.total
    weights_piece(left, 0, buffer, other, &piece)
    return mass_of(piece, left.p.n)


cdef double *room_for(double **place, Py_ssize_t *room, Py_ssize_t n) noexcept nogil:
    if room[0] < n:
        free(place[0])
        place[0] = <double *>malloc(n * sizeof(double))
        room[0] = n if place[0] is not NULL else 0
    return place[0]


cdef bint support_room(Room *room, Py_ssize_t count) noexcept nogil:
    cdef int i
    if room.support_room < count:
        room.support_room = 0
        for i in range(3):
            free(room.ids[i])
            free(room.weights[i])
            room.ids[i] = <int64_t *>malloc(count * sizeof(int64_t))
            room.weights[i] = <double *>malloc(count * sizeof(double))
            if room.ids[i] is NULL or room.weights[i] is NULL:
                return False
        room.support_room = count
    return True


cdef void free_room(Room *room) noexcept nogil:
    cdef int i
    for i in range(3):
        free(room.ids[i])
        free(room.weights[i])
    free(room.q_ids)
    free(room.q_weights)
    free(room.p)
    free(room.q)
    free(room.sums)


cdef bint is_support(const View *view) noexcept nogil:
    return view.mode == SPARSE or view.mode == POINT


cdef void as_dense_row(Row *row, double *values, Py_ssize_t n) noexcept nogil:
    row.data = <const char *>values
    row.n = n
    row.kind = F64
    row.patches = 0


cdef void scatter(const Support *support, double *out, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    memset(out, 0, n * sizeof(double))
    for i in range(support.count):
        out[support.ids[i]] = support.weights[i]


cdef bint wide_row(const View *view, double **place, Py_ssize_t *room, Py_ssize_t n, Row *row) noexcept nogil:
    """A view as a row of float64 with n entries, where it lies if it is one."""
    cdef double *out
    if view.mode == DENSE and view.row.kind == F64 and view.n == n:
        row[0] = view.row
        return True
    out = room_for(place, room, n)
    if out is NULL:
        return False
    if view.mode == DENSE:
        widen_into(&view.row, out)
    else:
        scatter(&view.support, out, n)
    as_dense_row(row, out, n)
    return True


# ---- entering a node -------------------------------------------------------------------------------


cdef problem open_row_of(Tree *tree, Side *side, bint of_draft, Py_ssize_t node, View *view) noexcept nogil:
    tree.block.failure.row = node + 1
    tree.block.failure.of_draft = of_draft
    return open_given(&tree.block, side, node + 1, view)


cdef problem enter(Tree *tree, Step *step, Py_ssize_t node, double reach) noexcept nogil:
    """Stand at a node; its rows are read if it has children."""
    cdef problem status
    cdef Failure *failure = &tree.block.failure
    cdef Room room = step.room
    memset(step, 0, sizeof(Step))
    step.room = room
    step.node = node
    step.reach = reach
    step.next_child = tree.first_child[node + 1]
    if step.next_child < 0:
        return FINE
    status = open_row_of(tree, &tree.block.target, False, node, &step.target)
    if status == FINE:
        status = open_row_of(tree, &tree.block.draft, True, node, &step.draft)
    if status != FINE:
        return status
    step.has_rows = True
    step.sparse = is_support(&step.target) and is_support(&step.draft)
    if not step.sparse and step.target.n != step.draft.n:
        failure.n = step.target.n
        failure.m = step.draft.n
        return BAD_LENGTH
    step.q_support = step.draft.support
    step.q_ascending = step.draft.ascending
    step.p_divisor = step.q_divisor = 1.0
    step.end = FROM_TARGET
    if tree.rule == KSEQ:
        return open_kseq(tree, step, tree.children[node + 1])
    return FINE


cdef problem ready_rows(Step *step) noexcept nogil:
    """Both rows in float64, before the first rejection of a pair that is not sparse."""
    if step.rows_ready:
        return FINE
    if not (wide_row(&step.target, &step.room.p, &step.room.p_room, step.target.n, &step.p)
            and wide_row(&step.draft, &step.room.q, &step.room.q_room, step.target.n, &step.q)
            and room_for(&step.room.sums, &step.room.sums_room, (step.target.n + BLOCK - 1) // BLOCK)):
        return NO_ROOM
    step.rows_ready = True
    return FINE


# ---- two numbers -----------------------------------------------------------------------------------


cdef problem target_probability(Step *step, int64_t token, Failure *failure, double *p) noexcept nogil:
    """p(x) after the rejections so far."""
    cdef double value, q
    failure.of_draft = False
    if not step.changed:
        return probability(&step.target, token, failure, p)
    if step.sparse:
        p[0] = find(&step.p_support, True, token)
        return FINE
    failure.token = token
    failure.n = step.p.n
    if not 0 <= token < step.p.n:
        return BAD_ID
    value = (<const double *>step.p.data)[token]
    if step.left.q is not NULL:
        q = (<const double *>step.q.data)[token]
        if step.p_divisor != 1.0:
            value /= step.p_divisor
        if step.q_divisor != 1.0:
            q /= step.q_divisor
        value = step.left.factor * value - q
        value = value * step.left.scale if value > 0.0 and isfinite(value) else 0.0
    p[0] = value / step.left_mass
    return FINE


cdef problem draft_probability(Step *step, int64_t token, Failure *failure, double *q) noexcept nogil:
    """q(x) for the next child."""
    failure.of_draft = True
    if step.draft_gone:
        q[0] = 0.0
        return FINE
    if step.draft.mode != DENSE:
        q[0] = find(&step.q_support, step.q_ascending, token)
        return FINE
    if step.q_divisor == 1.0 and not step.q_divided:
        return probability(&step.draft, token, failure, q)
    failure.token = token
    failure.n = step.q.n
    if not 0 <= token < step.q.n:
        return BAD_ID
    q[0] = (<const double *>step.q.data)[token] / step.q_divisor
    if not (q[0] >= 0.0 and isfinite(q[0])):
        failure.value = q[0]
        return BAD_VALUE
    return FINE


cdef problem child_threshold(Tree *tree, Step *step, int64_t token, double *threshold) noexcept nogil:
    cdef Failure *failure = &tree.block.failure
    cdef double p, q
    cdef problem status
    failure.row = step.node + 1
    if tree.block.check_draft:
        status = draft_probability(step, token, failure, &q)
        if status == FINE and q == 0.0:
            status = target_probability(step, token, failure, &p)
            if status == FINE and p > 0.0:
                failure.token = token
                return NOT_DRAWABLE
        if status != FINE:
            return status
    status = target_probability(step, token, failure, &p)
    if status == FINE:
        status = draft_probability(step, token, failure, &q)
    if status != FINE:
        return status
    if tree.rule == RECURSIVE:
        threshold[0] = acceptance(p, q)
    elif tree.rule == KSEQ:
        threshold[0] = prefix_acceptance(1.0, p, step.division * q)
    else:
        threshold[0] = prefix_acceptance(step.reach, p, q)
    return FINE


# ---- rejections ------------------------------------------------------------------------------------


cdef problem reject(Tree *tree, Step *step, int64_t token) noexcept nogil:
    """Account for the rejection of the child that held this token."""
    cdef double factor = step.reach if tree.rule == TRAVERSAL else 1.0
    cdef double left = 0.0
    cdef bint positive = False
    cdef problem status
    tree.block.failure.row = step.node + 1
    if tree.rule == KSEQ or step.draft_gone:
        return FINE
    if step.sparse:
        status = reject_sparse(tree, step, factor, &positive, &left)
    else:
        status = ready_rows(step)
        if status == FINE:
            status = reject_dense(tree, step, factor, &positive, &left)
    if status != FINE:
        return status
    if positive:
        step.changed = True
        step.end = FROM_LEFT
    elif tree.rule == RECURSIVE:
        step.end = FROM_POSITIVE
    if tree.rule == TRAVERSAL:
        step.reach = keep_probability(left, step.reach)
    if not tree.replacement:
        return take_out(step, token)
    return FINE


cdef problem reject_dense(Tree *tree, Step *step, double factor, bint *positive, double *left) noexcept nogil:
    cdef Weights after
    if step.changed and step.left.q is not NULL:
        if write_and_sum(step, factor, &after):
            return take_left(tree, step, &after, positive, left)
        if step.left.q is not NULL:
            return NO_ROOM
    positive[0] = weigh_scaled(&after, &step.p, &step.q, factor, step.p_divisor, step.q_divisor,
                               step.room.sums)
    if not positive[0]:
        if tree.rule == RECURSIVE and not weigh(&after, &step.p, NULL, True, step.room.sums):
            return WITHOUT_MASS
        if step.changed:
            # The sums of what is left were written over.
            weigh(&step.left, &step.p, NULL, False, step.room.sums)
        return FINE
    return take_left(tree, step, &after, positive, left)


cdef problem take_left(Tree *tree, Step *step, const Weights *after, bint *positive,
                       double *left) noexcept nogil:
    """Go on with what a rejection left, some of which is positive."""
    positive[0] = True
    step.left = after[0]
    step.left_mass = mass_left(after)
    left[0] = step.left_mass if after.scale == 1.0 else INFINITY
    if not tree.replacement and not write_left(step):  # q is about to change
        return NO_ROOM
    return FINE


cdef bint write_and_sum(Step *step, double factor, Weights *after) noexcept nogil:
    """`write_left`, and in the same pass the sums of `weigh_scaled`; False if those do not do."""
    cdef double buffer[CHUNK]
    cdef double other[CHUNK]
    cdef const double *piece
    cdef const double *q
    cdef Py_ssize_t n = step.p.n, start = 0, length
    cdef double *out = room_for(&step.room.p, &step.room.p_room, n)
    if out is NULL or step.left.scale != 1.0:
        write_left(step)
        return False
    while start < n:
        length = weights_piece(&step.left, start, buffer, other, &piece)
        memcpy(out + start, piece, length * sizeof(double))
        divide_parts(piece, length, step.left_mass, buffer)
        q = <const double *>step.q.data + start
        if step.q_divisor != 1.0:
            divide_parts(q, length, step.q_divisor, other)
            q = other
        table.block_sums_scaled(buffer, q, length, factor, step.room.sums + start // BLOCK)
        start += length
    written(step, out)
    after.p = &step.p
    after.q = &step.q
    after.factor = factor
    after.p_divisor = step.p_divisor
    after.q_divisor = step.q_divisor
    after.positive_part = False
    after.scale = 1.0
    after.sums = step.room.sums
    after.total = 0.0
    for start in range((n + BLOCK - 1) // BLOCK):
        after.total += step.room.sums[start]
    return after.total > 0.0 and isfinite(after.total)


cdef void written(Step *step, double *out) noexcept nogil:
    as_dense_row(&step.p, out, step.p.n)
    step.p_divisor = step.left_mass
    step.left.q = NULL
    step.left.p = &step.p
    step.left.factor = step.left.p_divisor = step.left.q_divisor = step.left.scale = 1.0


cdef bint write_left(Step *step) noexcept nogil:
    """Write what is left over, in place of p."""
    cdef double buffer[CHUNK]
    cdef double other[CHUNK]
    cdef const double *piece
    cdef Py_ssize_t n = step.p.n, start = 0, length
    cdef double *out = room_for(&step.room.p, &step.room.p_room, n)
    if out is NULL:
        return False
    while start < n:
        length = weights_piece(&step.left, start, buffer, other, &piece)
        memcpy(out + start, piece, length * sizeof(double))
        start += length
    written(step, out)
    return True


cdef problem reject_sparse(Tree *tree, Step *step, double factor, bint *positive,
                           double *left) noexcept nogil:
    cdef Room *room = &step.room
    cdef View ordered = step.target
    cdef Py_ssize_t i, count = 0
    cdef int64_t *ids
    cdef double *weights
    cdef double difference
    if not step.rows_ready:
        if not (ascend(&ordered, &tree.space, 0) and support_room(room, ordered.support.count)):
            return NO_ROOM
        memcpy(room.ids[0], ordered.support.ids, ordered.support.count * sizeof(int64_t))
        memcpy(room.weights[0], ordered.support.weights, ordered.support.count * sizeof(double))
        step.p_support.ids = room.ids[0]
        step.p_support.weights = room.weights[0]
        step.p_support.count = ordered.support.count
        step.rows_ready = True
    for i in range(step.p_support.count):
        difference = factor * step.p_support.weights[i] - find(&step.q_support, step.q_ascending,
                                                               step.p_support.ids[i])
        if difference > 0.0 and isfinite(difference):
            room.ids[2][count] = step.p_support.ids[i]
            room.weights[2][count] = difference
            count += 1
    positive[0] = count > 0
    if not positive[0]:
        return FINE
    left[0] = mass_of(room.weights[2], count)
    memcpy(room.ids[0], room.ids[2], count * sizeof(int64_t))
    memcpy(room.weights[0], room.weights[2], count * sizeof(double))
    normalise(room.weights[0], count)
    ids = room.ids[1]
    weights = room.weights[1]
    room.ids[1] = room.ids[2]
    room.weights[1] = room.weights[2]
    room.ids[2] = ids
    room.weights[2] = weights
    step.left_support.ids = room.ids[1]
    step.left_support.weights = room.weights[1]
    step.left_support.count = step.p_support.count = count
    return FINE


cdef problem take_out(Step *step, int64_t token) noexcept nogil:
    """q without the token, for the next sibling."""
    cdef Room *room = &step.room
    cdef Py_ssize_t i, count = 0
    cdef double total
    cdef double *q
    cdef bint bad
    if step.draft.mode != DENSE:
        if room.q_support_room < step.q_support.count:
            free(room.q_ids)
            free(room.q_weights)
            room.q_support_room = 0
            room.q_ids = <int64_t *>malloc(step.q_support.count * sizeof(int64_t))
            room.q_weights = <double *>malloc(step.q_support.count * sizeof(double))
            if room.q_ids is NULL or room.q_weights is NULL:
                return NO_ROOM
            room.q_support_room = step.q_support.count
        for i in range(step.q_support.count):
            if step.q_support.ids[i] != token:
                room.q_ids[count] = step.q_support.ids[i]
                room.q_weights[count] = step.q_support.weights[i]
                count += 1
        step.q_support.ids = room.q_ids
        step.q_support.weights = room.q_weights
        step.q_support.count = count
        step.draft_gone = not normalise(room.q_weights, count) > 0.0
        if not step.sparse:
            scatter(&step.q_support, <double *>step.q.data, step.q.n)
        return FINE
    q = room_for(&room.q, &room.q_room, step.q.n)
    if q is NULL:
        return NO_ROOM
    if step.q_divisor != 1.0:
        divide_parts(<const double *>step.q.data, step.q.n, step.q_divisor, q)
    elif <const char *>q != step.q.data:
        memcpy(q, step.q.data, step.q.n * sizeof(double))
    q[token] = 0.0
    as_dense_row(&step.q, q, step.q.n)
    total = checked_mass(q, step.q.n, &bad)
    if isinf(total):
        for i in range(step.q.n):
            q[i] *= OVERFLOW_SCALE
        total = checked_mass(q, step.q.n, &bad)
    step.draft_gone = total == 0.0 and not any_of(q, step.q.n)
    step.q_divisor = total
    if bad or not (total > 0.0 and isfinite(total)):
        # A row that is no distribution: divided here, as it is defined.
        table.divide_f64(q, step.q.n, total, q)
        step.q_divisor = 1.0
        step.q_divided = True
    return FINE


cdef bint any_of(const double *values, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        if values[i] != 0.0:
            return True
    return False


# ---- kseq ------------------------------------------------------------------------------------------


cdef problem open_kseq(Tree *tree, Step *step, Py_ssize_t siblings) noexcept nogil:
    """Both rows checked, and r: the upper of two adjacent numbers between which the equation turns."""
    cdef Py_ssize_t n = max(step.target.n, step.draft.n)
    cdef Failure *failure = &tree.block.failure
    cdef double total, low = 1.0, high = siblings, middle
    step.sparse = False
    if is_support(&step.target):
        step.target.any_id = False
    if not wide_row(&step.target, &step.room.p, &step.room.p_room, n, &step.p):
        return NO_ROOM
    failure.of_draft = False
    if weigh_row(&step.p, &total) != ROW_FINE:
        return BAD_ROW
    failure.of_draft = True
    if not wide_row(&step.draft, &step.room.q, &step.room.q_room, n, &step.q):
        return NO_ROOM
    if weigh_row(&step.q, &total) != ROW_FINE:
        return BAD_ROW
    if not room_for(&step.room.sums, &step.room.sums_room, (n + BLOCK - 1) // BLOCK):
        return NO_ROOM
    step.rows_ready = True
    if rounds_at(step, low, siblings) <= low:
        high = low
    while nextafter(low, INFINITY) < high:
        middle = low + 0.5 * (high - low)
        if rounds_at(step, middle, siblings) > middle:
            low = middle
        else:
            high = middle
    step.division = high
    step.rounds = rounds_at(step, high, siblings)
    # From here on tests look at rows of n entries.
    step.target.mode = step.draft.mode = DENSE
    step.target.n = step.draft.n = n
    step.target.row = step.p
    step.draft.row = step.q
    return FINE


cdef double rounds_at(const Step *step, double r, Py_ssize_t siblings) noexcept nogil:
    """``sum_{j < k} (1 - beta)^j`` with ``beta = sum min(p/r, q)``."""
    cdef double buffer[CHUNK]
    cdef double sums[2]
    cdef const double *p = <const double *>step.p.data
    cdef const double *q = <const double *>step.q.data
    cdef Py_ssize_t n = step.p.n, start = 0, length, i
    cdef double beta = 0.0, failure, total = 1.0
    while start < n:
        length = min(<Py_ssize_t>CHUNK, n - start)
        table.divide_f64(p + start, length, r, buffer)
        for i in range(length):
            buffer[i] = buffer[i] if buffer[i] < q[start + i] else q[start + i]
        if n <= BLOCK:
            beta = mass_of(buffer, n)
        else:
            table.block_sums(buffer, length, sums)
            beta += sums[0]
            if length > BLOCK:
                beta += sums[1]
        start += length
    failure = max(0.0, 1.0 - beta)
    for _ in range(siblings - 1):
        total = total * failure + 1.0
    return total


cdef problem leave_kseq(Step *step) noexcept nogil:
    """What is drawn from when all were rejected: (p - min(p/r, q) rounds)+, p where that is nothing."""
    cdef const double *p = <const double *>step.p.data
    cdef const double *q = <const double *>step.q.data
    cdef double *out = room_for(&step.room.q, &step.room.q_room, step.p.n)
    cdef Py_ssize_t i
    cdef double part
    if out is NULL:
        return NO_ROOM
    for i in range(step.p.n):
        part = p[i] / step.division
        part = p[i] - (part if part < q[i] else q[i]) * step.rounds
        out[i] = part if part > 0.0 and isfinite(part) else 0.0
    as_dense_row(&step.q, out, step.p.n)
    if not weigh(&step.left, &step.q, NULL, False, step.room.sums):
        weigh(&step.left, &step.p, NULL, False, step.room.sums)
    return FINE


# ---- the walk --------------------------------------------------------------------------------------


cdef problem run(Tree *tree) noexcept nogil:
    if tree.rule == TRAVERSAL:
        return bottom_up(tree)
    return top_down(tree)


cdef problem top_down(Tree *tree) noexcept nogil:
    cdef Step *step = &tree.steps[0]
    cdef problem status = enter(tree, step, -1, 1.0)
    cdef double threshold
    cdef Py_ssize_t child
    cdef bint rejected
    while status == FINE and step.next_child >= 0:
        child = step.next_child
        status = child_threshold(tree, step, tree.tokens[child], &threshold)
        rejected = status == FINE and threshold == 0.0
        if rejected:
            # Sure to be rejected: what can fail then, fails before the coin.
            status = reject(tree, step, tree.tokens[child])
        if status != FINE:
            return status
        if next_uniform(&tree.block.stream, NODE_LANE + <uint64_t>child) <= threshold and threshold > 0.0:
            tree.path[tree.accepted] = child
            tree.accepted += 1
            # Nothing of the node above is needed again.
            status = enter(tree, step, child, 1.0)
            continue
        if not rejected:
            status = reject(tree, step, tree.tokens[child])
        step.next_child = tree.next_sibling[child]
    if status != FINE:
        return status
    return finish(tree, step)


cdef problem bottom_up(Tree *tree) noexcept nogil:
    cdef Py_ssize_t at = 0, i, child
    cdef Step *step
    cdef double reach
    cdef problem status = enter(tree, &tree.steps[0], -1, 1.0)
    while status == FINE:
        step = &tree.steps[at]
        if step.next_child >= 0:
            child = step.next_child
            status = child_threshold(tree, step, tree.tokens[child], &reach)
            if status == FINE:
                at += 1
                status = enter(tree, &tree.steps[at], child, reach)
            continue
        if at == 0 or (next_uniform(&tree.block.stream, NODE_LANE + <uint64_t>step.node) <= step.reach
                       and step.reach > 0.0):
            for i in range(at):
                tree.path[i] = tree.steps[i + 1].node
            tree.accepted = at
            return finish(tree, step)
        at -= 1
        status = reject(tree, &tree.steps[at], tree.tokens[step.node])
        tree.steps[at].next_child = tree.next_sibling[step.node]
    return status


cdef problem finish(Tree *tree, Step *step) noexcept nogil:
    """The token behind the accepted path."""
    cdef int64_t *token = tree.out + tree.accepted
    cdef Weights weights
    cdef problem status
    cdef Py_ssize_t i, place
    for i in range(tree.accepted):
        tree.out[i] = tree.tokens[tree.path[i]]
    tree.block.failure.row = step.node + 1
    tree.bonus = not step.has_rows
    if tree.bonus:
        status = open_row_of(tree, &tree.block.target, False, step.node, &step.target)
        if status != FINE:
            return status
        return draw_token(&step.target, &tree.space, &tree.block.stream, BONUS_LANE, token)
    tree.block.failure.of_draft = False
    if tree.rule == KSEQ:
        status = leave_kseq(step)
        if status != FINE:
            return status
        token[0] = draw(&step.left, next_uniform(&tree.block.stream, CORRECTION_LANE))
        return FINE
    if step.end == FROM_TARGET:
        return draw_token(&step.target, &tree.space, &tree.block.stream, CORRECTION_LANE, token)
    if step.sparse:
        if step.end == FROM_POSITIVE:
            step.left_support = step.p_support
        place = draw_place(step.left_support.weights, step.left_support.count,
                           next_uniform(&tree.block.stream, CORRECTION_LANE))
        token[0] = step.left_support.ids[place]
        return FINE
    if step.end == FROM_LEFT:
        token[0] = draw(&step.left, next_uniform(&tree.block.stream, CORRECTION_LANE))
        return FINE
    if not weigh(&weights, &step.p, NULL, True, step.room.sums):
        return WITHOUT_MASS
    if step.p_divisor != 1.0:
        # The definition draws from the quotients.
        table.divide_f64(<const double *>step.p.data, step.p.n, step.p_divisor, <double *>step.p.data)
        weigh(&weights, &step.p, NULL, True, step.room.sums)
    token[0] = draw(&weights, next_uniform(&tree.block.stream, CORRECTION_LANE))
    return FINE


# ---- calls -----------------------------------------------------------------------------------------


cdef class OpenTree:
    """A tree with the memory that it needs."""

    cdef Tree tree
    cdef list kept
    cdef object tokens, out, path, generator

    def __cinit__(self):
        memset(&self.tree, 0, sizeof(Tree))
        self.kept = []

    def __dealloc__(self):
        cdef Py_ssize_t i
        free(self.tree.first_child)
        free(self.tree.next_sibling)
        free(self.tree.children)
        if self.tree.steps is not NULL:
            for i in range(self.tree.step_count):
                free_room(&self.tree.steps[i].room)
        free(self.tree.steps)
        free_workspace(&self.tree.space)
        Py_XDECREF(<PyObject *>self.tree.block.failure.error)

    cdef object open(self, object target, object draft, cnp.ndarray tokens, cnp.ndarray parents, str rule,
                     bint replacement, bint check_draft):
        cdef Tree *tree = &self.tree
        cdef Py_ssize_t n = cnp.PyArray_DIM(tokens, 0), node, row, depth
        cdef const int64_t *above = ids_of(parents)
        cdef Side *side
        cdef View view
        tree.rule = RULES[rule]
        tree.replacement = replacement
        tree.block.check_draft = check_draft
        tree.nodes = n
        self.tokens = tokens
        tree.tokens = ids_of(tokens)
        open_side(target, "target", &tree.block.target, False, self.kept)
        open_side(draft, "draft", &tree.block.draft, False, self.kept)
        for name in ("target", "draft"):
            side = &tree.block.target if name == "target" else &tree.block.draft
            if side.count != n + 1:
                raise ValueError(f"{name} has {side.count} rows for {n} drafts; expected {n + 1}")
        tree.block.status = open_row_of(tree, &tree.block.target, False, -1, &view)
        if tree.block.status != FINE:
            return self.error()
        # A sparse row has probability 0 for ids that it does not know, also for those beyond V.
        if n and view.mode == DENSE and int(tokens.max()) >= view.n:
            node = tokens.argmax()
            raise IndexError(f"node {node} has the token {tokens[node]}, outside [0, {view.n})")
        tree.first_child = <Py_ssize_t *>malloc((n + 1) * sizeof(Py_ssize_t))
        tree.next_sibling = <Py_ssize_t *>malloc((n + 1) * sizeof(Py_ssize_t))
        tree.children = <Py_ssize_t *>calloc(n + 1, sizeof(Py_ssize_t))
        if NULL in (tree.first_child, tree.next_sibling, tree.children):
            raise MemoryError
        for row in range(n + 1):
            tree.first_child[row] = -1
        for node in range(n - 1, -1, -1):
            row = above[node] + 1
            tree.next_sibling[node] = tree.first_child[row]
            tree.first_child[row] = node
            tree.children[row] += 1
        depth = deepest(above, n)
        # Top down one step is enough: what lies above a kept node is not needed again.
        tree.step_count = depth + 1 if tree.rule == TRAVERSAL else 1
        tree.steps = <Step *>calloc(tree.step_count, sizeof(Step))
        self.out = np.empty(depth + 1, dtype=np.int64)
        self.path = np.empty(depth, dtype=np.int64)
        if tree.steps is NULL:
            raise MemoryError
        tree.out = ids_of(self.out)
        tree.path = ids_of(self.path)
        return None

    cdef tuple error(self):
        """The exception of a tree that failed, and the row that it happened at."""
        cdef Failure *failure = &self.tree.block.failure
        cdef problem status = self.tree.block.status
        cdef str side = "draft_q" if failure.of_draft else "target_p"
        cdef str row = f"row {failure.row}"
        if status == RAISED:
            return <object>failure.error, row
        if status == NO_ROOM:
            return MemoryError(), ""
        if status == BAD_ID:
            return IndexError(f"token id {failure.token} is outside [0, {failure.n})"), row
        if status == BAD_LENGTH:
            return ValueError(f"target_p has {failure.n} entries, draft_q {failure.m}"), row
        if status == NOT_DRAWABLE:
            return ValueError(f"token {failure.token} cannot have been drafted from draft_q, "
                              f"where its probability is 0"), row
        if status == BAD_VALUE:
            return ValueError(f"{side} must be finite and not negative: "
                              f"entry {failure.token} is {failure.value}"), row
        if status == WITHOUT_MASS:
            return ValueError("neither the residual nor target_p has positive mass"), row
        return bad_probabilities(self.row_values(failure), side), row

    cdef object row_values(self, Failure *failure):
        cdef Side *side = &self.tree.block.draft if failure.of_draft else &self.tree.block.target
        cdef View view
        cdef Py_ssize_t i
        open_given(&self.tree.block, side, failure.row, &view)
        values = np.empty(view.n)
        for i in range(view.n):
            values[i] = element(&view.row, i)
        return values


cdef Py_ssize_t deepest(const int64_t *parents, Py_ssize_t n) except -1:
    """The length of the longest path."""
    cdef Py_ssize_t *depths = <Py_ssize_t *>malloc((n + 1) * sizeof(Py_ssize_t))
    cdef Py_ssize_t node, most = 0
    if depths is NULL:
        raise MemoryError
    depths[0] = 0
    for node in range(n):
        depths[node + 1] = depths[parents[node] + 1] + 1
        most = max(most, depths[node + 1])
    free(depths)
    return most


def open_tree(target, draft, tokens, parents, str rule, bint replacement, bint check_draft):
    """A tree, checked as far as no row but the first is reached; or (exception, where)."""
    cdef OpenTree opened = OpenTree.__new__(OpenTree)
    failed = opened.open(target, draft, tokens, parents, rule, replacement, check_draft)
    return opened if failed is None else failed


def verify_tree(OpenTree opened, generator, seed, position):
    """Tokens, path, accepted, bonus; or (exception, where). With a plain generator, or a keyed stream."""
    cdef Tree *tree = &opened.tree
    if generator is None:
        tree.block.stream.seed = seed
        tree.block.stream.position = position
        with nogil:
            tree.block.status = run(tree)
    else:
        opened.generator = generator.bit_generator
        tree.block.stream.bits = bitgen_of(opened.generator)
        lock = opened.generator.lock
        # One hold of the lock for the whole tree, so that another thread cannot draw in between.
        lock.acquire()
        with nogil:
            tree.block.status = run(tree)
        lock.release()
    if tree.block.status != FINE:
        return opened.error()
    return opened.out[:tree.accepted + 1], opened.path[:tree.accepted], tree.accepted, bool(tree.bonus)
