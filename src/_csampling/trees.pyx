"""Trees of drafts, verified in one call.

Design: a `Step` is one node whose children are being tested; it holds what earlier rejections left of p and
q, which is two multiples of the rows as given (`mtplx.reference.trees.Remainder`): a rejection is one pass
over both rows that writes nothing but the sums of blocks, and a test reads single entries. Sums that the
rule divides by are those of `mtplx.reference.trees.mass`: the kernels sum in that very order, so every
threshold has the reference's bits and nothing has to be certified but draws.

Memory: the sums of blocks for each node of the path that is followed, and a copy of rows that are not
float64; for kseq a sixth of a row more, and a row where what it leaves has to be written (`kseq`). Of
a sparse pair a few copies of the supports. Removed tokens ascend, so that no pass looks for them one by one.
"""

import numpy as np

cimport numpy as cnp
from cpython.ref cimport Py_XDECREF, PyObject
from libc.float cimport DBL_MAX
from libc.math cimport INFINITY, isfinite
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memmove, memset

from mtplx._csampling.acceptance cimport acceptance
from mtplx._csampling.arrays cimport F64, Row, bad_probabilities, ids_of
from mtplx._csampling.blocks cimport Block, Side, open_given
from mtplx._csampling.dispatch cimport BLOCK, CHUNK, table
from mtplx._csampling.distributions cimport Support, find
from mtplx._csampling.draws cimport (
    Removed,
    Weights,
    bitgen_of,
    draw,
    draw_place,
    first_removed,
    scaled_weight,
    weigh,
    weigh_scaled,
    weights_piece,
)
from mtplx._csampling.kseq cimport (
    BAD_DRAFT,
    OPENED,
    WITHOUT_ROOM,
    Division,
    begin,
    draw_left,
    free_division,
    hint,
    open_rows,
    opening,
    solve,
    weight_left,
)
from mtplx._csampling.mass cimport widen_into
from mtplx._csampling.rules cimport keep_probability, prefix_acceptance
from mtplx._csampling.streams cimport BONUS_LANE, CORRECTION_LANE, next_uniform
from mtplx._csampling.verification cimport elements_of, open_side, told_error
from mtplx._csampling.views cimport (
    BAD_ID,
    BAD_LENGTH,
    BAD_ROW,
    BAD_VALUE,
    DENSE,
    FINE,
    NO_ROOM,
    NOT_DRAWABLE,
    RAISED,
    WITHOUT_MASS,
    Failure,
    View,
    Workspace,
    ascend,
    draw_token,
    first_in,
    free_workspace,
    is_support,
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
    double *q_sums
    double *left          # of kseq, where it has to be written
    Removed *removed      # by ascending token
    Removed *removed_before   # the same when what is left was found
    Py_ssize_t p_room
    Py_ssize_t q_room
    Py_ssize_t sums_room
    Py_ssize_t q_sums_room
    Py_ssize_t removed_room
    Py_ssize_t left_room
    int64_t *ids[3]       # of a sparse pair: p; what is left; what will be left
    double *weights[3]
    double *subtracted    # q of the ids of p
    int64_t *other_ids    # what a sparse q has without the removed tokens, in its own order
    double *others
    Py_ssize_t support_room
    Py_ssize_t others_room

# A node, some of whose children were rejected. Rows point into the struct, so a step never moves.
cdef struct Step:
    Py_ssize_t node
    Py_ssize_t next_child    # -1: none is left to be tested
    tree_rule rule           # with a single child kseq is recursive: r = 1
    double reach             # P
    bint has_rows
    View target
    View draft
    bint sparse
    bint draft_gone          # used up by children without replacement
    bint changed             # something was taken from p
    ending end
    bint rows_ready
    double scale             # of p, once changed
    double multiple          # of q; 0 until then
    double left_mass         # of (scale p - multiple q)+, 1 until then
    int removed_count        # tokens taken out of q
    Py_ssize_t other_count   # entries of a sparse q without them
    double draft_mass        # of what q has without them
    # dense
    Row p
    Row q
    Weights left             # once changed
    # sparse
    Support p_support        # ascending
    Support left_support     # once changed
    # kseq
    Division division
    Room room

cdef struct Tree:
    Block block              # both sides, the stream, what failed
    tree_rule rule
    bint replacement
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
    """The sum of `mtplx.reference.trees.mass`."""
    cdef double sums[2]
    cdef double total = 0.0
    cdef Py_ssize_t i, length
    if n <= BLOCK:
        for i in range(n):
            total += values[i]
        return total
    i = 0
    while i < n:
        length = min(<Py_ssize_t>CHUNK, n - i)
        table.block_sums(values + i, length, sums)
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
        free(room.subtracted)
        room.subtracted = <double *>malloc(count * sizeof(double))
        if room.subtracted is NULL:
            return False
        room.support_room = count
    return True


cdef bint removed_room(Room *room, Py_ssize_t count) noexcept nogil:
    if room.removed_room < count:
        room.removed_room = 0
        free(room.removed)
        free(room.removed_before)
        room.removed = <Removed *>malloc(count * sizeof(Removed))
        room.removed_before = <Removed *>malloc(count * sizeof(Removed))
        if room.removed is NULL or room.removed_before is NULL:
            return False
        room.removed_room = count
    return True


cdef bint others_room(Room *room, Py_ssize_t count) noexcept nogil:
    if room.others_room < count:
        room.others_room = 0
        free(room.other_ids)
        free(room.others)
        room.other_ids = <int64_t *>malloc(count * sizeof(int64_t))
        room.others = <double *>malloc(count * sizeof(double))
        if room.other_ids is NULL or room.others is NULL:
            return False
        room.others_room = count
    return True


cdef void free_room(Room *room) noexcept nogil:
    cdef int i
    for i in range(3):
        free(room.ids[i])
        free(room.weights[i])
    free(room.subtracted)
    free(room.other_ids)
    free(room.others)
    free(room.removed)
    free(room.removed_before)
    free(room.left)
    free(room.p)
    free(room.q)
    free(room.sums)
    free(room.q_sums)


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
    cdef Division division = step.division
    memset(step, 0, sizeof(Step))
    step.room = room
    step.division = division
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
    step.left_mass = step.draft_mass = 1.0
    step.end = FROM_TARGET
    step.rule = tree.rule
    if tree.rule == KSEQ:
        if tree.children[node + 1] > 1:
            begin(&step.division, tree.children[node + 1])
            return FINE
        step.rule = RECURSIVE
    if not (tree.replacement or removed_room(&step.room, tree.children[node + 1])):
        return NO_ROOM
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
    failure.of_draft = False
    if not step.changed:
        return probability(&step.target, token, failure, p)
    if step.sparse:
        p[0] = find(&step.left_support, True, token) / step.left_mass
        return FINE
    failure.token = token
    failure.n = step.p.n
    if not 0 <= token < step.p.n:
        return BAD_ID
    p[0] = scaled_weight(&step.left, token) * step.left.scale / step.left_mass
    return FINE


cdef problem draft_probability(Step *step, int64_t token, Failure *failure, double *q) noexcept nogil:
    """q(x) for the next child."""
    cdef problem status
    failure.of_draft = True
    if step.draft_gone or was_removed(step, token):
        q[0] = 0.0
        return FINE
    status = probability(&step.draft, token, failure, q)
    if status != FINE or step.removed_count == 0:
        return status
    q[0] /= step.draft_mass
    if not (q[0] >= 0.0 and isfinite(q[0])):
        failure.token = token
        failure.value = q[0]
        return BAD_VALUE
    return FINE


cdef bint was_removed(const Step *step, int64_t token) noexcept nogil:
    cdef int place = first_removed(step.room.removed, step.removed_count, token)
    return place < step.removed_count and step.room.removed[place].token == token


cdef problem child_threshold(Tree *tree, Step *step, int64_t token, double *least,
                             double *most) noexcept nogil:
    """What the coin of a child is compared with lies between these two; kseq has not settled its r yet."""
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
    if step.rule == RECURSIVE:
        least[0] = acceptance(p, q)
    elif step.rule == KSEQ:
        hint(&step.division, p, q)
        # By how many children there are alone, whatever is known of r: what is read must not hang on it.
        least[0] = prefix_acceptance(1.0, p, step.division.siblings * q)
        most[0] = prefix_acceptance(1.0, p, q)
        return FINE
    else:
        least[0] = prefix_acceptance(step.reach, p, q)
    most[0] = least[0]
    return FINE


# ---- rejections ------------------------------------------------------------------------------------


cdef problem reject(Tree *tree, Step *step, Py_ssize_t child) noexcept nogil:
    """Account for the rejection of a child."""
    cdef double reach = step.reach if tree.rule == TRAVERSAL else 1.0
    cdef double left_over = 0.0
    cdef bint positive = False
    cdef problem status
    tree.block.failure.row = step.node + 1
    if step.draft_gone:
        return FINE
    status = ready_support(tree, step) if step.sparse else ready_rows(step)
    if status == FINE and reach > 0.0:
        status = take_from_target(tree, step, reach, &positive, &left_over)
    if status != FINE:
        return status
    if positive:
        step.changed = True
        step.end = FROM_LEFT
    elif step.rule == RECURSIVE and not step.changed:
        step.end = FROM_POSITIVE
    if tree.rule == TRAVERSAL:
        step.reach = keep_probability(left_over, step.reach)
    if not tree.replacement and tree.next_sibling[child] >= 0:
        return take_out(step, tree.tokens[child])
    return FINE


cdef problem take_from_target(Tree *tree, Step *step, double reach, bint *positive,
                              double *left_over) noexcept nogil:
    """`Remainder.less`: the next multiple of q, and what it leaves."""
    cdef double scale = step.scale if step.changed else reach
    cdef double part = reach if step.changed else 1.0
    cdef double multiple = step.multiple + step.left_mass / (part * step.draft_mass)
    cdef double mass = 0.0, shrink = 1.0
    cdef Support left
    cdef Weights after
    if multiple > DBL_MAX:
        multiple = DBL_MAX
    if step.sparse:
        left = subtract_support(step, scale, multiple)
        positive[0] = left.count > 0
        if not positive[0]:
            return FINE
        mass = mass_of(left.weights, left.count)
        keep_support(step, &left)
    else:
        positive[0] = weigh_scaled(&after, &step.p, &step.q, scale, multiple, step.room.removed,
                                   step.removed_count, step.room.sums)
        if not positive[0]:
            if step.changed:
                # The sums of what is left were written over.
                after = step.left
                weigh_scaled(&after, &step.p, &step.q, after.factor, after.multiple, after.removed,
                             after.removed_count, step.room.sums)
            elif step.rule == RECURSIVE and not weigh(&after, &step.p, NULL, True, step.room.sums):
                return WITHOUT_MASS
            return FINE
        mass = mass_left(&after)
        shrink = after.scale
        # The next token taken out moves others, and what is left is still to be read as it was found.
        if step.removed_count > 0:
            memcpy(step.room.removed_before, step.room.removed, step.removed_count * sizeof(Removed))
        after.removed = step.room.removed_before
        step.left = after
    if shrink != 1.0:
        left_over[0] = INFINITY
    else:
        left_over[0] = mass * (reach / step.left_mass) if step.changed else mass
    # Later differences are of rows that are scaled like what is left.
    step.scale = scale * shrink
    step.multiple = multiple * shrink
    step.left_mass = mass
    return FINE


cdef problem ready_support(Tree *tree, Step *step) noexcept nogil:
    """Both weights of the target's support by ascending id, before the first rejection of a sparse pair."""
    cdef Room *room = &step.room
    cdef View ordered = step.target
    cdef Support *p = &step.p_support
    cdef const Support *q = &step.draft.support
    cdef Py_ssize_t i, place
    if step.rows_ready:
        return FINE
    if not (ascend(&ordered, &tree.space, 0) and support_room(room, ordered.support.count)):
        return NO_ROOM
    memcpy(room.ids[0], ordered.support.ids, ordered.support.count * sizeof(int64_t))
    memcpy(room.weights[0], ordered.support.weights, ordered.support.count * sizeof(double))
    p.ids = room.ids[0]
    p.weights = room.weights[0]
    p.count = ordered.support.count
    if step.draft.ascending:
        for i in range(p.count):
            room.subtracted[i] = find(q, True, p.ids[i])
    else:
        # Only p can be searched in.
        memset(room.subtracted, 0, p.count * sizeof(double))
        for i in range(q.count):
            place = first_in(p, q.ids[i])
            if place < p.count and p.ids[place] == q.ids[i]:
                room.subtracted[place] = q.weights[i]
    step.rows_ready = True
    return FINE


cdef Support subtract_support(Step *step, double scale, double multiple) noexcept nogil:
    """(scale p - multiple q)+ of a sparse pair, without what is 0."""
    cdef Support left
    cdef int64_t *ids = step.room.ids[2]
    cdef double *weights = step.room.weights[2]
    cdef const Support *p = &step.p_support
    cdef const double *q = step.room.subtracted
    cdef const Removed *removed = step.room.removed
    cdef const Removed *end = removed + step.removed_count
    cdef Py_ssize_t i, count = 0
    cdef double its_own, difference
    for i in range(p.count):
        its_own = multiple
        while removed < end and removed.token < p.ids[i]:
            removed += 1
        if removed < end and removed.token == p.ids[i]:
            its_own = removed.multiple
        difference = scale * p.weights[i] - its_own * q[i]
        # Written over by the next one unless it counts.
        ids[count] = p.ids[i]
        weights[count] = difference
        count += difference > 0.0 and isfinite(difference)
    left.ids = ids
    left.weights = weights
    left.count = count
    return left


cdef void keep_support(Step *step, const Support *left) noexcept nogil:
    cdef Room *room = &step.room
    cdef int64_t *ids = room.ids[1]
    cdef double *weights = room.weights[1]
    step.left_support = left[0]
    room.ids[1] = room.ids[2]
    room.weights[1] = room.weights[2]
    room.ids[2] = ids
    room.weights[2] = weights


cdef problem take_out(Step *step, int64_t token) noexcept nogil:
    """q without the token, for the next sibling."""
    cdef Removed *removed = step.room.removed
    cdef int place = first_removed(removed, step.removed_count, token)
    if place < step.removed_count and removed[place].token == token:
        return FINE
    memmove(removed + place + 1, removed + place, (step.removed_count - place) * sizeof(Removed))
    removed[place].token = token
    removed[place].multiple = step.multiple
    step.removed_count += 1
    return weigh_others(step, token) if step.draft.mode == DENSE else weigh_other_entries(step, token)


cdef problem weigh_other_entries(Step *step, int64_t token) noexcept nogil:
    """The mass of a sparse q without the removed tokens, the last of which is given."""
    cdef Room *room = &step.room
    cdef const Support *q = &step.draft.support
    cdef Py_ssize_t place = 0, behind
    if step.removed_count == 1:
        if not others_room(room, q.count):
            return NO_ROOM
        memcpy(room.other_ids, q.ids, q.count * sizeof(int64_t))
        memcpy(room.others, q.weights, q.count * sizeof(double))
        step.other_count = q.count
    while place < step.other_count and room.other_ids[place] != token:
        place += 1
    if place < step.other_count:
        behind = step.other_count - place - 1
        memmove(room.other_ids + place, room.other_ids + place + 1, behind * sizeof(int64_t))
        memmove(room.others + place, room.others + place + 1, behind * sizeof(double))
        step.other_count -= 1
    step.draft_mass = mass_of(room.others, step.other_count)
    step.draft_gone = not any_of(room.others, step.other_count)
    return FINE


cdef problem weigh_others(Step *step, int64_t token) noexcept nogil:
    """The mass of a dense q without the removed tokens; of the last one only its block's sum changes."""
    cdef double buffer[BLOCK]
    cdef Py_ssize_t n = step.q.n, block = token // BLOCK
    cdef Py_ssize_t blocks = (n + BLOCK - 1) // BLOCK, length = min(<Py_ssize_t>BLOCK, n - block * BLOCK)
    cdef double *sums = room_for(&step.room.q_sums, &step.room.q_sums_room, blocks)
    cdef double total = 0.0
    if sums is NULL:
        return NO_ROOM
    others_of_block(step, block, length, buffer)
    if n > BLOCK:
        if step.removed_count == 1:
            table.block_sums(<const double *>step.q.data, n, sums)
        table.block_sums(buffer, length, sums + block)
        for block in range(blocks):
            total += sums[block]
    else:
        total = mass_of(buffer, n)
    step.draft_mass = total
    step.draft_gone = False
    if total == 0.0:
        # Nothing, or entries that are no probabilities and cancel.
        for block in range(blocks):
            length = min(<Py_ssize_t>BLOCK, n - block * BLOCK)
            others_of_block(step, block, length, buffer)
            if any_of(buffer, length):
                return FINE
        step.draft_gone = True
    return FINE


cdef void others_of_block(const Step *step, Py_ssize_t block, Py_ssize_t length, double *out) noexcept nogil:
    cdef const Removed *removed = step.room.removed
    cdef Py_ssize_t start = block * BLOCK
    cdef int j
    memcpy(out, <const double *>step.q.data + start, length * sizeof(double))
    for j in range(first_removed(removed, step.removed_count, start), step.removed_count):
        if removed[j].token >= start + length:
            return
        out[removed[j].token - start] = 0.0


cdef bint any_of(const double *values, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        if values[i] != 0.0:
            return True
    return False


# ---- kseq ------------------------------------------------------------------------------------------


cdef problem read_kseq(Tree *tree, Step *step) noexcept nogil:
    """Both rows, checked, and bounds of r."""
    cdef Py_ssize_t n = max(step.target.n, step.draft.n)
    cdef opening status
    if step.division.opened:
        return FINE
    if not (wide_row(&step.target, &step.room.p, &step.room.p_room, n, &step.p)
            and wide_row(&step.draft, &step.room.q, &step.room.q_room, n, &step.q)):
        return NO_ROOM
    status = open_rows(&step.division, &step.p, &step.q)
    tree.block.failure.of_draft = status == BAD_DRAFT
    if status == WITHOUT_ROOM:
        return NO_ROOM
    return FINE if status == OPENED else BAD_ROW


cdef problem settle_child(Tree *tree, Step *step, int64_t token, double u, double *threshold) noexcept nogil:
    """Find r as closely as the coin of a child asks for."""
    cdef double p, q, least, most
    cdef problem status = read_kseq(tree, step)
    if status == FINE:
        status = target_probability(step, token, &tree.block.failure, &p)
    if status == FINE:
        status = draft_probability(step, token, &tree.block.failure, &q)
    if status != FINE:
        return status
    least = prefix_acceptance(1.0, p, step.division.most * q)
    most = prefix_acceptance(1.0, p, step.division.least * q)
    threshold[0] = least
    if (u <= most and most > 0.0) and not (u <= least and least > 0.0):
        if not step.division.solved:
            solve(&step.division)
        threshold[0] = prefix_acceptance(1.0, p, step.division.division * q)
    return FINE


cdef problem draw_kseq(Tree *tree, Step *step, double u, int64_t *token) noexcept nogil:
    """From (p - min(p/r, q) rounds)+, from p where that is nothing; all children were rejected."""
    cdef double *out
    cdef Py_ssize_t i
    token[0] = draw_left(&step.division, u)
    if token[0] >= 0:
        return FINE
    out = room_for(&step.room.left, &step.room.left_room, step.p.n)
    if (out is NULL
            or room_for(&step.room.sums, &step.room.sums_room, (step.p.n + BLOCK - 1) // BLOCK) is NULL):
        return NO_ROOM
    for i in range(step.p.n):
        out[i] = weight_left(&step.division, i)
    as_dense_row(&step.q, out, step.p.n)
    if not weigh(&step.left, &step.q, NULL, False, step.room.sums):
        weigh(&step.left, &step.p, NULL, False, step.room.sums)
    token[0] = draw(&step.left, u)
    return FINE


# ---- the walk --------------------------------------------------------------------------------------


cdef problem run(Tree *tree) noexcept nogil:
    if tree.rule == TRAVERSAL:
        return bottom_up(tree)
    return top_down(tree)


cdef problem top_down(Tree *tree) noexcept nogil:
    cdef Step *step = &tree.steps[0]
    cdef problem status = enter(tree, step, -1, 1.0)
    cdef double threshold, most, u
    cdef Py_ssize_t child
    cdef bint rejected
    while status == FINE and step.next_child >= 0:
        child = step.next_child
        status = child_threshold(tree, step, tree.tokens[child], &threshold, &most)
        rejected = status == FINE and most == 0.0
        if rejected:
            # Sure to be rejected: what can fail then, fails before the coin.
            status = reject(tree, step, child) if step.rule != KSEQ else read_kseq(tree, step)
        if status != FINE:
            return status
        u = next_uniform(&tree.block.stream, NODE_LANE + <uint64_t>child)
        if (u <= most and most > 0.0) and not (u <= threshold and threshold > 0.0):
            status = settle_child(tree, step, tree.tokens[child], u, &threshold)
            if status != FINE:
                return status
        if u <= threshold and threshold > 0.0:
            tree.path[tree.accepted] = child
            tree.accepted += 1
            # Nothing of the node above is needed again.
            status = enter(tree, step, child, 1.0)
            continue
        if not rejected and step.rule != KSEQ:
            status = reject(tree, step, child)
        step.next_child = tree.next_sibling[child]
    if status != FINE:
        return status
    return finish(tree, step)


cdef problem bottom_up(Tree *tree) noexcept nogil:
    cdef Py_ssize_t at = 0, i, child
    cdef Step *step
    cdef double reach, same
    cdef problem status = enter(tree, &tree.steps[0], -1, 1.0)
    while status == FINE:
        step = &tree.steps[at]
        if step.next_child >= 0:
            child = step.next_child
            status = child_threshold(tree, step, tree.tokens[child], &reach, &same)
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
        status = reject(tree, &tree.steps[at], step.node)
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
    if step.rule == KSEQ:
        status = read_kseq(tree, step)
        if status != FINE:
            return status
        if not step.division.solved:
            solve(&step.division)
        return draw_kseq(tree, step, next_uniform(&tree.block.stream, CORRECTION_LANE), token)
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
                free_division(&self.tree.steps[i].division)
        free(self.tree.steps)
        free_workspace(&self.tree.space)
        Py_XDECREF(<PyObject *>self.tree.block.failure.error)

    cdef object open(self, object target, object draft, cnp.ndarray tokens, cnp.ndarray parents, str rule,
                     bint replacement, bint check_draft):
        cdef Tree *tree = &self.tree
        cdef Py_ssize_t n = min(cnp.PyArray_DIM(tokens, 0), cnp.PyArray_DIM(parents, 0)), node, row, depth
        cdef const int64_t *above = ids_of(parents)
        cdef Side *side
        cdef View view
        tree.rule = RULES[rule]
        tree.replacement = replacement
        tree.block.check_draft = check_draft
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
            if not 0 <= row <= node:
                raise ValueError(f"the parent of node {node} is {row - 1}, not in [-1, {node})")
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
        cdef View view
        if self.tree.block.status == RAISED:
            return <object>failure.error, f"row {failure.row}"
        told = told_error(&self.tree.block)
        if told is not None:
            return told
        open_given(&self.tree.block, &self.tree.block.draft if failure.of_draft else &self.tree.block.target,
                   failure.row, &view)
        return (bad_probabilities(elements_of(&view.row), "draft_q" if failure.of_draft else "target_p"),
                f"row {failure.row}")


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
        try:
            with nogil:
                tree.block.status = run(tree)
        finally:
            lock.release()
    if tree.block.status != FINE:
        return opened.error()
    return opened.out[:tree.accepted + 1], opened.path[:tree.accepted], tree.accepted, bool(tree.bonus)
