"""The division r of the tree rule kseq, and what it leaves.

Design: r is defined by a bisection of [1, k] whose every step takes two sums over V, in an order that is
part of the definition (`mtplx.reference.trees.KSeqNode`). It is found bit by bit in some two passes. A guess
from a sample of the rows is followed by one pass, which also checks the rows; Newton's step from there lies
within some 1e-4 of r. A second pass sums at a point just above, and counts the elements on either side of
a certified point just below. Between the two only blocks with elements in between change, and soon none does:
then both sums are constants. The bisection is walked as it is defined, with what was certified on the way;
tests of children look at r only where its bounds leave them open.

Certificate. Let beta(r) = sum min(p/r, q), f(r) = rounds(beta(r)) - r with rounds(b) = sum_{j<k} (1 - b)^j
(b > 1 counts as 1), all exact. As r grows beta falls and r beta rises, so f beta = 1 - (1 - beta)^k - r beta
falls. For m < r hence f(m) >= f(r) beta(r)/beta(m) >= f(r)/k where f(r) > 0; for m > r f(m) <= f(r) where
f(r) < 0. The sums of the definition are within (n/256 + 300) 2^-53 of the exact ones, relatively; rounds
has a slope of at most k (k - 1)/2, and Horner's scheme adds 2 k^2 2^-53. So what is computed for f is within
e = k^2 (n/256 + 310) 2^-52 of f (twice what adds up). Where it is above (k + 2) e, all points below give
rounds > r when they are computed too; where below -(k + 2) e, all points above give rounds <= r.

Bounds. Let M and N be the sums of p where p <= r q, and of q elsewhere. min(p/x, q) is at most p/x and at
most q, so beta(x) <= M/x + N for every x: the root of that equation is not above the true one (it is Newton's
step, which therefore comes from below). And beta(x) >= min(1, r/x) beta(r) bounds it from above. With each
goes a margin, so that what is computed exceeds (k + 2) e.

At a double root (p = q) f stays within e of 0 on one side, and there is no certified point near r. Then the
bisection is walked between what bounds there are (`DIVISION_BRACKET` counts it).
"""

cimport numpy as cnp
from libc.math cimport INFINITY, fabs, isfinite, nextafter
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from mtplx._csampling.arrays cimport F64, Row, doubles
from mtplx._csampling.dispatch cimport (
    BLOCK,
    DIVISION_BRACKET,
    DIVISION_DRAW,
    count_fallback,
    table,
)
from mtplx._csampling.mass cimport ROW_FINE, weigh_row

cnp.import_array()

cdef double UNIT = 2.0 ** -53

cdef enum:
    SAMPLED = 16       # one in so many elements is looked at for the first guess,
    RUN = 64           # in runs of so many
    WITH_SAMPLE = 4096  # of rows at least this long
    STEPS = 8          # of Newton, at most


cdef void begin(Division *division, Py_ssize_t siblings) noexcept nogil:
    cdef double *memory = division.memory
    cdef Py_ssize_t room = division.room
    memset(division, 0, sizeof(Division))
    division.memory = memory
    division.room = room
    division.siblings = siblings
    division.least = 1.0
    division.most = siblings


cdef void hint(Division *division, double p, double q) noexcept nogil:
    """Two entries that are known, as those of a draft are."""
    cdef int i
    for i in range(division.hints):
        if division.hint_p[i] == p and division.hint_q[i] == q:
            return
    if division.hints < HINTS:
        division.hint_p[division.hints] = p
        division.hint_q[division.hints] = q
        division.hints += 1


cdef void free_division(Division *division) noexcept nogil:
    free(division.memory)


# ---- the equation with M and N for constants --------------------------------------------------------


cdef double rounds_of(double p_mass, double q_mass, double r, Py_ssize_t siblings) noexcept nogil:
    """``sum_{j < k} (1 - beta)^j`` with ``beta = M/r + N``, as it is defined."""
    cdef double failure = max(0.0, 1.0 - (p_mass / r + q_mass)), total = 1.0
    for _ in range(siblings - 1):
        total = total * failure + 1.0
    return total


cdef double root_of(double p_mass, double q_mass, Py_ssize_t siblings) noexcept nogil:
    """Roughly where rounds = r."""
    cdef double low = 1.0, high = siblings, at, beta, failure, total, slope, excess
    at = 0.5 * (low + high)
    for _ in range(60):
        beta = p_mass / at + q_mass
        failure = max(0.0, 1.0 - beta)
        total = 1.0
        slope = 0.0    # of total, by failure
        for _ in range(siblings - 1):
            slope = slope * failure + total
            total = total * failure + 1.0
        excess = total - at
        if excess > 0.0:
            low = at
        else:
            high = at
        slope = slope * p_mass / (at * at) - 1.0
        beta = at - excess / slope
        if not low < beta < high:
            beta = 0.5 * (low + high)
        if fabs(beta - at) <= 4e-16 * at:
            return beta
        at = beta
    return at


cdef double sure(const Division *division) noexcept nogil:
    """What the computed rounds - r has to exceed to be a certificate."""
    return (division.siblings + 2) * division.tolerance


cdef double certified_below(const Division *division, double p_mass, double q_mass,
                            double root) noexcept nogil:
    """A point just below the root of ``M/x + N`` where the equation has certainly not turned; 0: none."""
    cdef double margin = 4.0 * sure(division), point
    for _ in range(6):
        point = root - margin
        if point < 1.0:
            return 0.0
        if rounds_of(p_mass, q_mass, point, division.siblings) - point > sure(division):
            return point
        margin *= 16.0
    return 0.0


cdef double certified_above(const Division *division, double p_mass, double root) noexcept nogil:
    """A point just above the root of ``M/x`` where it certainly has turned; infinite if none is."""
    cdef double margin = 4.0 * sure(division), point
    for _ in range(6):
        point = root + margin
        if rounds_of(p_mass, 0.0, point, division.siblings) - point < -sure(division):
            return point
        margin *= 16.0
    return INFINITY


# ---- sums -------------------------------------------------------------------------------------------


cdef void sum_one_by_one(const Division *division, double r, Parts *at) noexcept nogil:
    """Of rows that are no longer than a block."""
    cdef const double *p = division.p
    cdef const double *q = division.q
    cdef Py_ssize_t i
    at.p_mass = at.q_mass = 0.0
    at.count = 0
    for i in range(division.n):
        if p[i] <= r * q[i]:
            at.p_mass += p[i]
            at.count += 1
        else:
            at.q_mass += q[i]


cdef void add_up(const Division *division, Parts *at) noexcept nogil:
    cdef double p_mass = 0.0, q_mass = 0.0
    cdef int64_t count = 0
    cdef Py_ssize_t i
    for i in range((division.n + BLOCK - 1) // BLOCK):
        p_mass += at.p_sums[i]
        q_mass += at.q_sums[i]
        count += at.counts[i]
    at.p_mass = p_mass
    at.q_mass = q_mass
    at.count = count


cdef double excess_at(Division *division, double r, double below) noexcept nogil:
    """The computed rounds - r, whose parts go to `spare`; `low` is counted anew at a ratio below r.

    Blocks that count the same at both ends have the parts of `high`: as r grows no element leaves the first.
    """
    cdef Parts *at = &division.spare
    cdef Parts *low = &division.low
    cdef const Parts *high = &division.high
    cdef Py_ssize_t n = division.n, blocks = (n + BLOCK - 1) // BLOCK, i = 0, first, start, length
    cdef bint all_of_them = not (division.low_known and division.high_known)
    at.ratio = r
    if n <= BLOCK:
        sum_one_by_one(division, r, at)
        division.summed += n
        return rounds_of(at.p_mass, at.q_mass, r, division.siblings) - r
    while i < blocks:
        first = i
        while i < blocks and (all_of_them or low.counts[i] != high.counts[i]):
            i += 1
        if first < i:
            start = first * BLOCK
            length = min(i * BLOCK, n) - start
            table.block_sums_between(division.p + start, division.q + start, length, below, r,
                                     at.p_sums + first, at.q_sums + first, low.counts + first,
                                     at.counts + first)
            division.summed += length
        while i < blocks and low.counts[i] == high.counts[i]:
            at.p_sums[i] = high.p_sums[i]
            at.q_sums[i] = high.q_sums[i]
            at.counts[i] = high.counts[i]
            i += 1
    add_up(division, at)
    low.count = 0
    for i in range(blocks):
        low.count += low.counts[i]
    division.low_known = True
    return rounds_of(at.p_mass, at.q_mass, r, division.siblings) - r


cdef void spare_is_low(Division *division) noexcept nogil:
    cdef Parts swapped = division.low
    division.low = division.spare
    division.spare = swapped
    division.low_known = True


cdef void spare_is_high(Division *division) noexcept nogil:
    cdef Parts swapped = division.high
    division.high = division.spare
    division.spare = swapped
    division.high_known = True


cdef bint settled(const Division *division) noexcept nogil:
    """Whether M and N are the same at both ends, and at all points between."""
    return division.low_known and division.high_known and division.low.count == division.high.count


# ---- opening ----------------------------------------------------------------------------------------


cdef bint make_room(Division *division, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t blocks = (n + BLOCK - 1) // BLOCK
    cdef Py_ssize_t needed = 10 * blocks + 2 * (n // SAMPLED + RUN)
    cdef Parts *parts[3]
    cdef double *place
    cdef int i
    if division.room < needed:
        free(division.memory)
        division.memory = <double *>malloc(needed * sizeof(double))
        division.room = needed if division.memory is not NULL else 0
        if division.memory is NULL:
            return False
    parts[0] = &division.low
    parts[1] = &division.high
    parts[2] = &division.spare
    place = division.memory
    for i in range(3):
        parts[i].p_sums = place
        parts[i].q_sums = place + blocks
        parts[i].counts = <int64_t *>(place + 2 * blocks)
        place += 3 * blocks
    division.totals = place
    return True


cdef double guess(const Division *division) noexcept nogil:
    """Where r may be, by a sample that is made to have what the hints leave of two rows of mass 1."""
    cdef Py_ssize_t n = division.n, taken = 0, start = 0, run, blocks, i
    cdef double *p = division.totals + (n + BLOCK - 1) // BLOCK
    cdef double *q = p + n // SAMPLED + RUN
    cdef double p_total = 0.0, q_total = 0.0, at = 1.0 + 0.25 * (division.siblings - 1), p_mass, q_mass
    cdef double p_scale = 1.0, q_scale = 1.0
    if n < WITH_SAMPLE:
        return at
    while start < n:
        run = min(<Py_ssize_t>RUN, n - start)
        memcpy(p + taken, division.p + start, run * sizeof(double))
        memcpy(q + taken, division.q + start, run * sizeof(double))
        taken += run
        start += SAMPLED * RUN
    # `spare` has room for the sums: the sample has fewer blocks than the row.
    blocks = (taken + BLOCK - 1) // BLOCK
    table.block_sums(p, taken, division.spare.p_sums)
    table.block_sums(q, taken, division.spare.q_sums)
    for i in range(blocks):
        p_total += division.spare.p_sums[i]
        q_total += division.spare.q_sums[i]
    if not (p_total > 0.0 and q_total > 0.0 and isfinite(p_total) and isfinite(q_total)):
        return at
    for i in range(division.hints):
        p_scale -= division.hint_p[i]
        q_scale -= division.hint_q[i]
    p_scale = max(0.0, p_scale) / p_total
    q_scale = max(0.0, q_scale) / q_total
    for _ in range(2):
        table.block_sums_parted(p, q, taken, at * q_scale / p_scale if p_scale > 0.0 else INFINITY,
                                division.spare.p_sums, division.spare.q_sums, division.spare.counts)
        p_mass = q_mass = 0.0
        for i in range(blocks):
            p_mass += division.spare.p_sums[i] * p_scale
            q_mass += division.spare.q_sums[i] * q_scale
        for i in range(division.hints):
            if division.hint_p[i] <= at * division.hint_q[i]:
                p_mass += division.hint_p[i]
            else:
                q_mass += division.hint_q[i]
        at = root_of(p_mass, q_mass, division.siblings)
    return at


cdef opening open_rows(Division *division, const Row *p, const Row *q) noexcept nogil:
    cdef Py_ssize_t n = p.n, i
    cdef double at = 1.0, total, largest, excess
    cdef bint doubtful = True
    cdef Parts *spare = &division.spare
    if not make_room(division, n):
        return WITHOUT_ROOM
    division.p = <const double *>p.data
    division.q = <const double *>q.data
    division.n = n
    division.tolerance = (n // 256 + 310) * 2.0 * UNIT * division.siblings * division.siblings
    at = guess(division)
    if not 1.0 < at < division.siblings:
        at = 1.0
    spare.ratio = at
    if n <= BLOCK:
        sum_one_by_one(division, at, spare)
    else:
        doubtful = table.block_sums_checked(division.p, division.q, n, at, spare.p_sums, spare.q_sums,
                                            spare.counts, division.totals, &largest)
        add_up(division, spare)
        for i in range((n + BLOCK - 1) // BLOCK):
            division.p_total += division.totals[i]
        doubtful |= not (0.0 < division.p_total and isfinite(division.p_total) and 0.0 < largest
                         and isfinite(largest) and isfinite(spare.q_mass))
    division.summed += n
    if doubtful:
        if weigh_row(p, &total) != ROW_FINE:
            return BAD_TARGET
        if weigh_row(q, &total) != ROW_FINE:
            return BAD_DRAFT
    division.opened = True
    excess = rounds_of(spare.p_mass, spare.q_mass, at, division.siblings) - at
    take(division, excess)
    return OPENED


cdef bint take(Division *division, double excess) noexcept nogil:
    """Take note of what is in `spare`; whether it is certain on which side of r it lies."""
    cdef Parts *at = &division.spare
    cdef double taken = at.p_mass + at.ratio * at.q_mass, point
    division.seen = at[0]
    division.root = root_of(at.p_mass, at.q_mass, division.siblings)
    division.least = max(division.least, certified_below(division, at.p_mass, at.q_mass, division.root))
    if excess < -sure(division) or at.ratio >= division.most:
        point = rounds_of(taken, 0.0, at.ratio, division.siblings) + 2.0 * sure(division)
        division.most = min(division.most, min(at.ratio, point))
        spare_is_high(division)
        return True
    point = certified_above(division, taken, root_of(taken, 0.0, division.siblings))
    if point > at.ratio:
        division.most = min(division.most, point)
    if excess > sure(division):
        division.least = max(division.least, at.ratio)
        spare_is_low(division)
        return True
    return False


# ---- solving ----------------------------------------------------------------------------------------


cdef void solve(Division *division) noexcept nogil:
    approach(division)
    if not settled(division):
        count_fallback(DIVISION_BRACKET)
    walk(division)
    division.solved = True


cdef void approach(Division *division) noexcept nogil:
    """Narrow the bounds by Newton's steps until no element changes sides between them."""
    cdef double shift, point, root, bend = 2.0
    for _ in range(STEPS):
        if settled(division):
            return
        # Newton's step falls short by about the square of its length, times what the last one showed.
        root = division.root
        shift = (root - division.seen.ratio) / root
        point = root * (1.0 + bend * shift * shift) + 8.0 * sure(division)
        if point >= division.most:
            point = 0.5 * (root + division.most) if division.high_known else division.most
        if not (division.least < point <= division.most
                and take(division, excess_at(division, point, division.least))):
            return
        if division.least >= point:
            bend *= 16.0
        elif shift != 0.0:
            bend = min(2.0, 4.0 * (division.root - root) / (root * shift * shift) + 0.01)


cdef void walk(Division *division) noexcept nogil:
    """The bisection as it is defined."""
    cdef double low = 1.0, high = division.siblings, middle
    if not division.high_known:
        excess_at(division, division.most, division.least)
        spare_is_high(division)
    if division.least == 1.0 and middle_excess(division, 1.0, 1.0) <= 0.0:
        high = 1.0
    while nextafter(low, INFINITY) < high:
        middle = low + 0.5 * (high - low)
        if middle <= division.least:
            low = middle
        elif middle >= division.most:
            high = middle
        elif middle_excess(division, middle, low) > 0.0:
            low = middle
        else:
            high = middle
    if not settled(division) and division.high.ratio != high:
        excess_at(division, high, low)
        spare_is_high(division)
    division.division = high
    division.rounds = rounds_of(division.high.p_mass, division.high.q_mass, high, division.siblings)


cdef double middle_excess(Division *division, double middle, double below) noexcept nogil:
    """The computed rounds - r between both ends, one of which moves there unless it makes no difference."""
    cdef double excess
    if settled(division):
        return rounds_of(division.high.p_mass, division.high.q_mass, middle, division.siblings) - middle
    excess = excess_at(division, middle, below)
    if excess > 0.0:
        spare_is_low(division)
    else:
        spare_is_high(division)
    return excess


# ---- what is left -----------------------------------------------------------------------------------


cdef Py_ssize_t draw_left(const Division *division, double u) noexcept nogil:
    """The first id whose cumulative weight exceeds u times their sum.

    By sums of blocks: of ``p - min(p/r, q) rounds`` a block has what it has of p above r q, less rounds times
    q there, and next to nothing elsewhere. Each of these sums is within 20 roundings, a weight within 4: so a
    block is within 64 2^-53 times what it has of p, where p is not so small that 2^-1074 counts; for the rest
    see `draws`.
    """
    cdef Py_ssize_t n = division.n, blocks = (n + BLOCK - 1) // BLOCK, block = 0, i
    cdef double share = (division.division - division.rounds) / division.division
    cdef double total = 0.0, left, target, tolerance, before = 0.0, cumulative
    if n <= BLOCK:
        return -1
    for i in range(blocks):
        total += mass_left(division, i, share)
    tolerance = UNIT * ((2.0 * n + 16.0) * total + 128.0 * division.p_total)
    target = u * total
    if 1e-280 < division.p_total and isfinite(division.p_total):
        while block < blocks:
            left = mass_left(division, block, share)
            if before + left > target - tolerance:
                break
            before += left
            block += 1
        cumulative = before
        for i in range(block * BLOCK, n):
            before = cumulative
            cumulative += weight_left(division, i)
            if cumulative > target:
                if cumulative - target > tolerance and target - before > tolerance:
                    return i
                break
    count_fallback(DIVISION_DRAW)
    return -1


cdef inline double mass_left(const Division *division, Py_ssize_t block, double share) noexcept nogil:
    cdef double p_mass = division.high.p_sums[block]
    return max(0.0, (division.totals[block] - p_mass) - division.rounds * division.high.q_sums[block]
               + share * p_mass)


# ---- for tests and measurements ---------------------------------------------------------------------


def solved(cnp.ndarray p, cnp.ndarray q, Py_ssize_t siblings):
    """r and rounds of two rows of float64, and how many passes over both rows they took."""
    cdef Division division
    cdef Row rows[2]
    cdef opening status
    cdef int i
    for i, row in enumerate((p, q)):
        if (not cnp.PyArray_IS_C_CONTIGUOUS(row) or cnp.PyArray_TYPE(row) != cnp.NPY_FLOAT64
                or cnp.PyArray_NDIM(row) != 1 or cnp.PyArray_DIM(row, 0) != cnp.PyArray_DIM(p, 0)):
            raise TypeError("p and q must be contiguous rows of float64, of one length")
        rows[i].data = <const char *>doubles(row)
        rows[i].n = cnp.PyArray_DIM(row, 0)
        rows[i].kind = F64
        rows[i].patches = 0
    if siblings < 2:
        raise ValueError(f"siblings must be 2 or more, not {siblings}")
    memset(&division, 0, sizeof(division))
    begin(&division, siblings)
    with nogil:
        status = open_rows(&division, &rows[0], &rows[1])
        if status == OPENED:
            solve(&division)
    free_division(&division)
    if status == WITHOUT_ROOM:
        raise MemoryError
    if status != OPENED:
        raise ValueError("p is no probabilities" if status == BAD_TARGET else "q is no probabilities")
    return division.division, division.rounds, division.summed / <double>division.n
