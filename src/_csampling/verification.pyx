"""Blocks of drafted tokens, verified in one call: what comes in, and what goes out.

Design: everything that can be checked without reaching a row is checked when a block is opened; then a
whole range of blocks is verified with one release of the GIL (`rules.run`). Errors are raised after it.
"""

import operator

import numpy as np

cimport cython
cimport numpy as cnp
from cpython.ref cimport Py_XDECREF, PyObject
from libc.math cimport isnan
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from mtplx._csampling.arrays cimport (
    BF16,
    F16,
    F32,
    F64,
    Row,
    as_rows_array,
    bad_probabilities,
    doubles,
    element,
    id_within,
    ids_of,
    imported,
    is_bfloat16,
    new_doubles,
    new_ids,
    open_row,
    ranks_kept,
)
from mtplx._csampling.blocks cimport (
    BATCH,
    BLOCK_RULE,
    BY_DRAFT,
    BY_TARGET,
    BY_TARGET_RATIO,
    CASCADE,
    EXACT,
    GREEDY,
    MATCH,
    MATRIX,
    POINTS,
    SEQUENCE,
    TYPICAL,
    Block,
    Penalties,
    Side,
    patch,
)
from mtplx._csampling.distributions cimport bad_logits
from mtplx._csampling.draws cimport bitgen_of
from mtplx._csampling.penalties cimport clamped
from mtplx._csampling.rules cimport run
from mtplx._csampling.truncation cimport nucleus_mass
from mtplx._csampling.views cimport (
    BAD_ID,
    BAD_LENGTH,
    BAD_LOGITS,
    BAD_ROW,
    BAD_VALUE,
    FINE,
    NO_ROOM,
    NOT_DRAWABLE,
    RAISED,
    WITHOUT_MASS,
    Failure,
    Settings,
    Workspace,
    free_workspace,
)

cnp.import_array()

cdef extern from "Python.h":
    Py_ssize_t PY_SSIZE_T_MAX

cdef dict RULES = {"exact": EXACT, "greedy": GREEDY, "match": MATCH, "block": BLOCK_RULE, "typical": TYPICAL,
                   "cascade": CASCADE}
cdef dict DEFERRALS = {"tokenv1": BY_DRAFT, "tokenv2": BY_TARGET, "tokenv3": BY_TARGET_RATIO}


# ---- opening -----------------------------------------------------------------------------------------


cdef object open_side(object rows, str name, Side *side, bint logits, list kept):
    cdef cnp.ndarray array
    side.kept = <PyObject *>kept
    if not logits and hasattr(rows, "vocab_size") and hasattr(rows, "to_distribution"):
        side.kind = BATCH
        ids = rows.token_ids
        probs = rows.probs
        kept.append((ids, probs))
        side.count = ids.shape[0]
        side.width = ids.shape[1]
        side.ids = <const int64_t *>cnp.PyArray_DATA(<cnp.ndarray>ids)
        side.probs = <const double *>cnp.PyArray_DATA(<cnp.ndarray>probs)
        side.vocab_size = rows.vocab_size
        return rows
    if not isinstance(rows, (list, tuple)):
        rows = as_rows_array(rows, name)
    if cnp.PyArray_Check(rows):
        array = <cnp.ndarray>rows
        side.count = cnp.PyArray_DIM(array, 0)
        if (cnp.PyArray_NDIM(array) == 2 and cnp.PyArray_DIM(array, 1) > 0 and cnp.PyArray_ISALIGNED(array)
                and cnp.PyArray_ISNOTSWAPPED(array)
                and cnp.PyArray_STRIDE(array, 1) == cnp.PyArray_ITEMSIZE(array)
                and row_kind(array) >= 0):
            side.kind = MATRIX
            side.first.kind = row_kind(array)
            side.first.n = cnp.PyArray_DIM(array, 1)
            side.first.data = <const char *>cnp.PyArray_DATA(array)
            side.first.patches = 0
            side.stride = cnp.PyArray_STRIDE(array, 0)
            kept.append(rows)
            return rows
    else:
        side.count = len(rows)
    side.kind = SEQUENCE
    side.rows = <PyObject *>rows
    kept.append(rows)
    return rows


cdef int row_kind(cnp.ndarray array) except -2:
    cdef int typenum = cnp.PyArray_TYPE(array)
    if typenum == cnp.NPY_DOUBLE:
        return F64
    if typenum == cnp.NPY_FLOAT:
        return F32
    if array.dtype.char == "e":
        return F16
    return BF16 if is_bfloat16(array.dtype) else -1


cdef class OpenBlock:
    """A block with the memory that it needs."""

    cdef Block block
    cdef list kept
    cdef object ids, out, probabilities, coins, generator
    cdef char *unreadable

    def __cinit__(self):
        memset(&self.block, 0, sizeof(Block))
        self.unreadable = NULL
        self.kept = []

    def __dealloc__(self):
        cdef Penalties *penalties = &self.block.penalties
        free(self.unreadable)
        free(penalties.ids)
        free(penalties.counts)
        free(penalties.overlay_starts)
        free(penalties.overlay_ids)
        free(penalties.overlays)
        free(penalties.patch_ids)
        free(penalties.patches)
        Py_XDECREF(<PyObject *>self.block.failure.error)

    cdef object open(self, object target, Py_ssize_t target_count, object draft, Py_ssize_t draft_count,
                     object draft_tokens, tuple rule, bint check_draft, bint from_logits):
        """Counts are how many of the rows are meant, -1 for all."""
        cdef Block *block = &self.block
        cdef Py_ssize_t K
        block.rule = RULES[rule[0]]
        self.open_parameters(rule)
        block.check_draft = check_draft
        block.from_logits = from_logits
        self.open_tokens(draft_tokens)
        K = block.drafts
        open_side(target, "target", &block.target, from_logits, self.kept)
        if target_count >= 0:
            block.target.count = min(block.target.count, target_count)
        if block.target.count != K and block.target.count != K + 1:
            raise ValueError(f"target has {block.target.count} rows for {K} drafts; "
                             f"expected {K + 1}, or {K} without a bonus row")
        if draft is None:
            block.draft.kind = POINTS
        else:
            open_side(draft, "draft", &block.draft, from_logits, self.kept)
            if draft_count >= 0:
                block.draft.count = min(block.draft.count, draft_count)
            if block.draft.count != K:
                raise ValueError(f"draft has {block.draft.count} rows for {K} drafts")
        self.out = new_ids(K + 1)
        self.probabilities = new_doubles(K)
        block.out = ids_of(self.out)
        block.probabilities = doubles(self.probabilities)
        if block.rule == BLOCK_RULE:
            self.coins = new_doubles(K)
            block.coins = doubles(self.coins)

    cdef object open_parameters(self, tuple rule):
        cdef Block *block = &self.block
        if block.rule == TYPICAL:
            block.parameters.eps = rule[1]
            block.parameters.delta = rule[2]
        elif block.rule == CASCADE:
            block.parameters.alpha = rule[1]
            block.parameters.deferred = DEFERRALS[rule[2]]

    @cython.boundscheck(True)  # the caller's lists may shrink meanwhile
    cdef object open_tokens(self, object draft_tokens):
        """Ids are read now where that can fail for none, else each when it is reached."""
        cdef Py_ssize_t i, K
        if not isinstance(draft_tokens, (list, tuple)):
            if hasattr(draft_tokens, "__array__") or hasattr(draft_tokens, "__dlpack__"):
                draft_tokens = imported(draft_tokens, "draft_tokens")
                if draft_tokens.ndim != 1:
                    raise ValueError("draft_tokens must be one-dimensional, "
                                     f"not of shape {draft_tokens.shape}")
            elif isinstance(draft_tokens, (str, bytes)) or not (
                    hasattr(draft_tokens, "__len__") and hasattr(draft_tokens, "__getitem__")):
                raise TypeError("draft_tokens must be a sequence of ids, "
                                f"not {type(draft_tokens).__name__}")
        K = len(draft_tokens)
        self.block.drafts = K
        self.kept.append(draft_tokens)
        self.block.given_tokens = <PyObject *>draft_tokens
        self.ids = new_ids(K)
        self.block.tokens = ids_of(self.ids)
        for i in range(K):
            try:
                token = draft_tokens[i]
                ids_of(self.ids)[i] = operator.index(token)
            except Exception:
                if self.unreadable is NULL:
                    self.unreadable = <char *>calloc(K, 1)
                    if self.unreadable is NULL:
                        raise MemoryError
                    self.block.unreadable = self.unreadable
                self.unreadable[i] = 1

    cdef object configure(self, object config, object draft_config, object token_counts,
                          object penalty_overlay):
        """Settings of both sides; the vocabulary is that of the first target row."""
        cdef Block *block = &self.block
        cdef Py_ssize_t n = self.vocabulary(&block.target)
        settle_config(&block.target_settings, config, n)
        if block.draft.kind != POINTS:
            settle_config(&block.draft_settings, draft_config, self.vocabulary(&block.draft))
        # The sums that other rules divide by run over whole rows.
        block.target_settings.gather = block.draft_settings.gather = block.rule in (EXACT, GREEDY, MATCH)
        block.penalties.presence = clamped(config.presence_penalty, "presence_penalty")
        block.penalties.frequency = clamped(config.frequency_penalty, "frequency_penalty")
        self.open_penalties(token_counts, penalty_overlay, n)

    @cython.boundscheck(True)  # the caller's lists may shrink meanwhile
    cdef Py_ssize_t vocabulary(self, const Side *side) except -1:
        cdef Row row
        if side.kind == MATRIX:
            return side.first.n
        if side.count == 0:
            return PY_SSIZE_T_MAX  # nothing will be looked up
        self.kept.append(open_row((<object>side.rows)[0], "logits", &row))
        return row.n

    cdef object open_penalties(self, object token_counts, object penalty_overlay, Py_ssize_t n):
        cdef Block *block = &self.block
        cdef Penalties *penalties = &block.penalties
        cdef Py_ssize_t rows = block.target.count, total = 0, most = 0, i
        cdef double count
        each = isinstance(penalty_overlay, (list, tuple))
        if token_counts is not None and not is_mapping(token_counts):
            raise TypeError("token_counts must be a mapping of token ids, "
                            f"not {type(token_counts).__name__}")
        if each and len(penalty_overlay) not in (rows, block.drafts + 1):
            raise ValueError(f"penalty_overlay has {len(penalty_overlay)} entries for {rows} target rows")
        overlays = penalty_overlay if each else ([penalty_overlay] if penalty_overlay else [])
        for overlay in overlays:
            if overlay is not None and not is_mapping(overlay):
                raise TypeError("penalty_overlay must be a mapping of token ids, "
                                f"not {type(overlay).__name__}")
            most = max(most, len(overlay or ()))
            total += len(overlay or ())
        if penalties.presence == 0.0 and penalties.frequency == 0.0:
            token_counts = None
        elif most == 0 and not token_counts and block.drafts == 0:
            return
        elif token_counts is None:
            token_counts = {}
        if token_counts is None and most == 0:
            return
        counted = len(token_counts or ())
        penalties.ids = <int64_t *>malloc((counted + block.drafts + 1) * sizeof(int64_t))
        penalties.counts = <double *>malloc((counted + block.drafts + 1) * sizeof(double))
        penalties.patch_ids = <int64_t *>malloc((counted + block.drafts + most + 1) * sizeof(int64_t))
        penalties.patches = <double *>malloc((counted + block.drafts + most + 1) * sizeof(double))
        if NULL in (penalties.ids, penalties.counts, penalties.patch_ids, penalties.patches):
            raise MemoryError
        for token, given in sorted((token_counts or {}).items()):
            count = given
            if not count >= 0.0:
                raise ValueError(f"token {token} has the count {given}")
            penalties.ids[penalties.filled] = id_within(token, n)
            penalties.counts[penalties.filled] = count
            penalties.filled += 1
        if most:
            penalties.overlay_each = each
            penalties.overlay_starts = <Py_ssize_t *>malloc((len(overlays) + 1) * sizeof(Py_ssize_t))
            penalties.overlay_ids = <int64_t *>malloc(total * sizeof(int64_t))
            penalties.overlays = <double *>malloc(total * sizeof(double))
            if NULL in (penalties.overlay_starts, penalties.overlay_ids, penalties.overlays):
                raise MemoryError
            total = 0
            for i, overlay in enumerate(overlays):
                penalties.overlay_starts[i] = total
                for token, given in sorted((overlay or {}).items()):
                    count = given
                    if isnan(count):
                        raise ValueError(f"penalty_overlay of token {token} is {given}")
                    penalties.overlay_ids[total] = id_within(token, n)
                    penalties.overlays[total] = count
                    total += 1
            penalties.overlay_starts[len(overlays)] = total

    cdef tuple result(self):
        cdef Block *block = &self.block
        tested = self.probabilities[:block.tested]
        return self.out[:block.emitted], block.accepted, tested, bool(block.bonus)

    cdef object error(self):
        """The exception of a block that failed, which names the row."""
        cdef Failure *failure = &self.block.failure
        cdef str side = "draft_q" if failure.of_draft else "target_p"
        cdef str row = f"row {failure.row}"
        if self.block.status == RAISED:
            return <object>failure.error, row
        if self.block.status == NO_ROOM:
            return MemoryError(), ""
        if self.block.status == BAD_ID:
            token = failure.token
            if self.unreadable is not NULL and self.unreadable[failure.row]:
                token = operator.index((<object>self.block.given_tokens)[failure.row])
            return IndexError(f"token id {token} is outside [0, {failure.n})"), row
        if self.block.status == BAD_LENGTH:
            return ValueError(f"target_p has {failure.n} entries, draft_q {failure.m}"), row
        if self.block.status == NOT_DRAWABLE:
            return ValueError(f"token {failure.token} cannot have been drafted from draft_q, "
                              f"where its probability is 0"), row
        if self.block.status == BAD_VALUE:
            return ValueError(f"{side} must be finite and not negative: "
                              f"entry {failure.token} is {failure.value}"), row
        if self.block.status == BAD_ROW and failure.of_draft and self.block.rule == CASCADE:
            return ValueError(f"{side} must be finite and not negative: "
                              f"entry {failure.token} is {failure.value}"), row
        if self.block.status == BAD_ROW and self.block.rule == TYPICAL and failure.row < self.block.drafts:
            side = "distribution"  # the entropy's, which is asked for after p(x)
        if self.block.status == WITHOUT_MASS:
            return ValueError("neither the residual nor target_p has positive mass"), row
        if self.block.status == BAD_LOGITS:
            return bad_logits(self.row_values(failure), "softmax"), row
        return bad_probabilities(self.row_values(failure), side), row

    @cython.boundscheck(True)  # the caller's lists may shrink meanwhile
    cdef object row_values(self, Failure *failure):
        cdef Side *side = &self.block.draft if failure.of_draft else &self.block.target
        cdef Row row
        cdef Py_ssize_t i
        if side.kind == MATRIX:
            row = side.first
            row.data += failure.row * side.stride
        else:
            _owner = open_row((<object>side.rows)[failure.row], "logits", &row)
            row.patches = 0
        if not failure.of_draft:
            patch(&self.block.penalties, failure.row, &row)
        values = np.empty(row.n)
        for i in range(row.n):
            values[i] = element(&row, i)
        for i in range(row.patches):
            values[row.patch_ids[i]] = row.patch_values[i]
        return values


cdef bint is_mapping(object value):
    from collections.abc import Mapping
    # One class at a time: Cython drops the errors of isinstance with a tuple, and Mapping's runs Python code.
    return isinstance(value, dict) or isinstance(value, Mapping)


cdef object settle_config(Settings *settings, object config, Py_ssize_t n):
    settings.temperature = config.temperature
    if isnan(settings.temperature):
        raise ValueError("temperature is nan")
    settings.top_p = nucleus_mass(config.top_p)
    settings.k = ranks_kept(config.top_k, n)


# ---- calls ---------------------------------------------------------------------------------------------


cdef object attach_stream(OpenBlock opened, object generator):
    opened.generator = generator.bit_generator
    opened.block.stream.bits = bitgen_of(opened.generator)


def verify_block(target, draft, draft_tokens, generator, tuple rule, bint check_draft, bint from_logits,
                 config, draft_config, token_counts, penalty_overlay):
    """One block with a plain generator: tokens, accepted, accept probabilities, whether there is a bonus.

    An error comes back as (exception, where), for the caller to raise.
    """
    cdef OpenBlock opened = OpenBlock.__new__(OpenBlock)
    cdef Workspace space
    opened.open(target, -1, draft, -1, draft_tokens, rule, check_draft, from_logits)
    if from_logits:
        try:
            opened.configure(config, draft_config, token_counts, penalty_overlay)
        except Exception as error:
            return error, "row 0"
    attach_stream(opened, generator)
    memset(&space, 0, sizeof(Workspace))
    lock = opened.generator.lock
    # One hold of the lock for the whole block, so that another thread cannot draw in between.
    lock.acquire()
    with nogil:
        opened.block.status = run(&opened.block, &space)
        free_workspace(&space)
    lock.release()
    if opened.block.status != FINE:
        return opened.error()
    return opened.result()


@cython.boundscheck(True)  # the caller's lists may shrink meanwhile
def open_blocks(list targets, list target_counts, list drafts, list draft_counts, list tokens, list streams,
                tuple rule, bint check_draft, bint from_logits, list configs, list draft_configs, list counts,
                list overlays):
    """Blocks of a batch, opened and checked; a stream is a generator or a pair (seed, position).

    Gives the blocks, or (exception, where, sequence).
    """
    cdef OpenBlock opened
    cdef list blocks = []
    cdef Py_ssize_t b
    for b in range(len(targets)):
        opened = OpenBlock.__new__(OpenBlock)
        where = ""
        try:
            opened.open(targets[b], target_counts[b], drafts[b], draft_counts[b], tokens[b], rule,
                        check_draft, from_logits)
            if from_logits:
                where = "row 0"
                opened.configure(configs[b], draft_configs[b], counts[b], overlays[b])
        except Exception as error:
            return error, where, b
        if type(streams[b]) is tuple:
            opened.block.stream.seed = streams[b][0]
            opened.block.stream.position = streams[b][1]
        else:
            attach_stream(opened, streams[b])
        blocks.append(opened)
    return blocks


@cython.boundscheck(True)  # the caller's lists may shrink meanwhile
def vocabulary(list blocks):
    """Entries of a row of the first block, 0 where that is not known without reading one."""
    cdef OpenBlock opened
    if not blocks:
        return 0
    opened = blocks[0]
    if opened.block.target.kind == MATRIX:
        return opened.block.target.first.n
    return opened.block.target.width if opened.block.target.kind == BATCH else 0


@cython.boundscheck(True)  # the caller's lists may shrink meanwhile
def run_blocks(list blocks, Py_ssize_t first, Py_ssize_t last):
    """Verify a range of opened blocks with one release of the GIL."""
    cdef Py_ssize_t b
    cdef Workspace space
    cdef OpenBlock opened
    cdef Block **range_of = <Block **>malloc((last - first) * sizeof(Block *))
    if range_of is NULL:
        raise MemoryError
    # In an order of their own, so that two ranges that share generators cannot wait for each other.
    generators = {id(opened.generator): opened.generator
                  for opened in blocks[first:last] if opened.generator is not None}
    locks = [generators[key].lock for key in sorted(generators)]
    for b in range(first, last):
        opened = blocks[b]
        range_of[b - first] = &opened.block
    memset(&space, 0, sizeof(Workspace))
    for lock in locks:
        lock.acquire()
    with nogil:
        for b in range(last - first):
            range_of[b].status = run(range_of[b], &space)
        free_workspace(&space)
    for lock in locks:
        lock.release()
    free(range_of)


@cython.boundscheck(True)  # the caller's lists may shrink meanwhile
def collect_blocks(list blocks, Py_ssize_t drafts):
    """Results as padded arrays, or (exception, where, sequence) of the first block that failed."""
    cdef OpenBlock opened
    cdef Py_ssize_t b, B = len(blocks)
    tokens = np.full((B, drafts + 1), -1, dtype=np.int64)
    num_tokens = np.zeros(B, dtype=np.int64)
    accepted = np.zeros(B, dtype=np.int64)
    probabilities = np.full((B, drafts), np.nan)
    for b in range(B):
        opened = blocks[b]
        if opened.block.status != FINE:
            return (*opened.error(), b)
        emitted, accepted[b], tested, _bonus = opened.result()
        num_tokens[b] = len(emitted)
        tokens[b, :len(emitted)] = emitted
        probabilities[b, :len(tested)] = tested
    return tokens, num_tokens, accepted, probabilities
