"""Blocks of drafted tokens, verified in one call: what comes in, and what goes out.

Design: everything that can be checked without reaching a row is checked when a block is opened; then a
whole range of blocks is verified with one release of the GIL (`rules.run`). Errors are raised after it.
"""

import operator
from collections.abc import Mapping

import numpy as np

cimport cython
cimport numpy as cnp
from cpython.ref cimport Py_DECREF, Py_XDECREF, PyObject
from libc.math cimport isnan
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

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
    ids_of,
    imported,
    is_bfloat16,
    new_doubles,
    new_ids,
    open_row,
    ranks_kept,
    real,
)
from mtplx._csampling.blocks cimport (
    BATCH,
    BLOCK_RULE,
    CASCADE,
    DEFERRALS,
    EXACT,
    GREEDY,
    MATCH,
    MATRIX,
    POINTS,
    SEQUENCE,
    TYPICAL,
    Block,
    KeptSum,
    Penalties,
    Side,
    patch,
)
from mtplx._csampling.distributions cimport bad_logits, is_batch
from mtplx._csampling.draws cimport bitgen_of
from mtplx._csampling.penalties cimport clamped, plain_numbers, require_mapping
from mtplx._csampling.rules cimport run
from mtplx._csampling.truncation cimport nucleus_mass
from mtplx._csampling.views cimport (
    BAD_ID,
    BAD_LENGTH,
    BAD_LOGITS,
    BAD_PENALTY_ID,
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
    long long PyLong_AsLongLongAndOverflow(object value, int *overflow) except? -1
    bint PyLong_CheckExact(object value)
    object PyType_GenericNew(type kind, object arguments, void *keywords)
    int PyObject_GenericSetAttr(object value, object name, object attribute) except -1

cdef dict RULES = {"exact": EXACT, "greedy": GREEDY, "match": MATCH, "block": BLOCK_RULE, "typical": TYPICAL,
                   "cascade": CASCADE}


# ---- opening -----------------------------------------------------------------------------------------


cdef object open_side(object rows, str name, Side *side, bint logits, list kept):
    cdef cnp.ndarray array
    # What an attribute is asked of, and misses it, makes an exception: the usual types are not asked.
    cdef bint usual = type(rows) is list or type(rows) is tuple or (
        cnp.PyArray_CheckExact(rows) and cnp.PyArray_NDIM(<cnp.ndarray>rows) == 2)
    if not usual and not logits and is_batch(rows):
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
    if not usual and not isinstance(rows, (list, tuple)):
        rows = as_rows_array(rows, name)
    if cnp.PyArray_Check(rows):
        array = <cnp.ndarray>rows
        side.count = cnp.PyArray_DIM(array, 0)
        if cnp.PyArray_NDIM(array) == 2 and is_matrix(array, side):
            kept.append(rows)
            return rows
    else:
        side.count = len(rows)
    side.kind = SEQUENCE
    side.rows = <PyObject *>rows
    kept.append(rows)
    opened = {}
    side.opened = <PyObject *>opened
    kept.append(opened)
    return rows


cdef bint is_matrix(cnp.ndarray array, Side *side) except -1:
    """Whether rows lie along the last axis as they can be read; then the side reads along the axis before."""
    cdef int last = cnp.PyArray_NDIM(array) - 1
    cdef int kind
    if not (cnp.PyArray_DIM(array, last) > 0 and cnp.PyArray_ISALIGNED(array)
            and cnp.PyArray_ISNOTSWAPPED(array)
            and cnp.PyArray_STRIDE(array, last) == cnp.PyArray_ITEMSIZE(array)):
        return False
    kind = row_kind(array)
    if kind < 0:
        return False
    side.kind = MATRIX
    side.count = cnp.PyArray_DIM(array, last - 1)
    side.first.kind = kind
    side.first.n = cnp.PyArray_DIM(array, last)
    side.first.data = <const char *>cnp.PyArray_DATA(array)
    side.first.patches = 0
    side.stride = cnp.PyArray_STRIDE(array, last - 1)
    return True


# The rows of a batch as one array, or as a list of what each block has.
cdef struct Stack:
    bint is_array
    Side side          # of block 0
    Py_ssize_t step    # bytes from block to block


cdef object open_stack(object rows, Stack *stack):
    """The rows as they are, or as a list."""
    stack.is_array = (cnp.PyArray_Check(rows) and cnp.PyArray_NDIM(<cnp.ndarray>rows) == 3
                      and is_matrix(<cnp.ndarray>rows, &stack.side))
    if stack.is_array:
        stack.step = cnp.PyArray_STRIDE(<cnp.ndarray>rows, 0)
        return rows
    return list(rows)


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
    cdef object generator
    cdef object raised       # what the caller's code raised while rows were read
    cdef tuple refused       # an error of the settings, and where; or None
    cdef Py_ssize_t overlays  # how many there are, -1 for one of all rows
    cdef char *unreadable
    cdef double *memory  # of tokens and results

    def __cinit__(self):
        memset(&self.block, 0, sizeof(Block))
        self.unreadable = NULL
        self.memory = NULL
        self.kept = []
        self.overlays = -1

    def __dealloc__(self):
        cdef Penalties *penalties = &self.block.penalties
        free(self.unreadable)
        free(self.memory)
        free(self.block.sums)
        free(penalties.ids)
        free(penalties.counts)
        free(penalties.overlay_starts)
        free(penalties.overlay_ids)
        free(penalties.overlays)
        free(penalties.patch_ids)
        free(penalties.patches)
        Py_XDECREF(<PyObject *>self.block.failure.error)

    cdef object open(self, object target, object draft, object draft_tokens, tuple rule, bint check_draft,
                     tuple settings):
        cdef bint from_logits = settings is not None
        self.open_rule(rule, check_draft, from_logits)
        self.open_tokens(draft_tokens, target, -1)
        if from_logits:
            config, draft_config, token_counts, penalty_overlay = settings
            self.read_settings(config, None if draft is None else draft_config, token_counts, penalty_overlay)
            self.open_sums()
        open_side(target, "target", &self.block.target, from_logits, self.kept)
        self.check_target(-1)
        if draft is None:
            self.block.draft.kind = POINTS
        else:
            open_side(draft, "draft", &self.block.draft, from_logits, self.kept)
            self.check_draft_rows(-1)

    cdef object open_rule(self, tuple rule, bint check_draft, bint from_logits):
        self.block.rule = RULES[rule[0]]
        self.open_parameters(rule)
        self.block.check_draft = check_draft
        self.block.from_logits = from_logits

    cdef object check_target(self, Py_ssize_t count):
        """`count` is how many of the rows are meant, -1 for all; as for drafts and their rows."""
        cdef Block *block = &self.block
        cdef Py_ssize_t K = block.drafts
        if count >= 0:
            block.target.count = min(block.target.count, count)
        require_rows(block.target.count, K)

    cdef object check_draft_rows(self, Py_ssize_t count):
        cdef Block *block = &self.block
        if count >= 0:
            block.draft.count = min(block.draft.count, count)
        if block.draft.count != block.drafts:
            raise ValueError(f"draft has {block.draft.count} rows for {block.drafts} drafts")

    cdef int64_t *open_memory(self, Py_ssize_t K) except NULL:
        """Room for K drafts and their results; returns that of the drafts."""
        cdef Block *block = &self.block
        self.memory = <double *>malloc((4 * K + 1) * sizeof(double))
        if self.memory is NULL:
            raise MemoryError
        block.drafts = K
        block.probabilities = self.memory
        block.coins = self.memory + K if block.rule == BLOCK_RULE else NULL
        block.out = <int64_t *>(self.memory + 2 * K)
        block.tokens = block.out + K + 1
        return block.out + K + 1

    cdef object open_parameters(self, tuple rule):
        cdef Block *block = &self.block
        if block.rule == TYPICAL:
            block.parameters.eps = rule[1]
            block.parameters.delta = rule[2]
        elif block.rule == CASCADE:
            block.parameters.alpha = rule[1]
            block.parameters.deferred = DEFERRALS[rule[2]]

    @cython.boundscheck(True)  # the caller's lists may shrink meanwhile
    cdef object open_tokens(self, object draft_tokens, object target, Py_ssize_t count):
        """Ids are read now where that can fail for none, else each when it is reached.

        Where the target's rows are easily counted, ids that are more than these are not looked at.
        """
        cdef Py_ssize_t i, K
        cdef int64_t *ids
        cdef int overflow
        if not isinstance(draft_tokens, (list, tuple)):
            if hasattr(draft_tokens, "__array__") or hasattr(draft_tokens, "__dlpack__"):
                draft_tokens = imported(draft_tokens, "draft_tokens")
                if draft_tokens.ndim != 1:
                    raise ValueError("draft_tokens must be one-dimensional, "
                                     f"not of shape {draft_tokens.shape}")
            elif not is_sequence(draft_tokens):
                raise TypeError("draft_tokens must be a sequence of ids, "
                                f"not {type(draft_tokens).__name__}")
        K = len(draft_tokens) if count < 0 else count
        if type(target) is list or type(target) is tuple or (
                cnp.PyArray_CheckExact(target) and cnp.PyArray_NDIM(<cnp.ndarray>target) == 2):
            require_rows(len(target), K)
        self.kept.append(draft_tokens)
        self.block.given_tokens = <PyObject *>draft_tokens
        ids = self.open_memory(K)
        for i in range(K):
            try:
                token = draft_tokens[i]
                if PyLong_CheckExact(token):
                    ids[i] = PyLong_AsLongLongAndOverflow(token, &overflow)
                    if not overflow:
                        continue
                ids[i] = operator.index(token)
            except Exception:
                if self.unreadable is NULL:
                    self.unreadable = <char *>calloc(K, 1)
                    if self.unreadable is NULL:
                        raise MemoryError
                    self.block.unreadable = self.unreadable
                self.unreadable[i] = 1

    cdef object copy_tokens(self, cnp.ndarray tokens, Py_ssize_t b, Py_ssize_t K):
        """The first K ids of row b of an int64 array."""
        cdef int64_t *ids = self.open_memory(K)
        cdef const char *row = <const char *>cnp.PyArray_DATA(tokens) + b * cnp.PyArray_STRIDE(tokens, 0)
        cdef Py_ssize_t i, stride = cnp.PyArray_STRIDE(tokens, 1)
        for i in range(K):
            ids[i] = (<const int64_t *>(row + i * stride))[0]

    cdef object read_settings(self, object config, object draft_config, object token_counts,
                              object penalty_overlay):
        """Of both sides, before the address of a row is taken: any of it may run code of the caller's.

        What is wrong with it is kept for `check_settings`, after what is wrong with the rows.
        """
        cdef Block *block = &self.block
        cdef Penalties *penalties = &block.penalties
        cdef Py_ssize_t i = 0
        cdef bint each = is_sequence(penalty_overlay)
        where = ""
        try:
            require_mapping(token_counts, "token_counts")
            given = list(penalty_overlay) if each else [penalty_overlay]
            self.overlays = len(given) if each else -1
            for overlay in given:
                require_mapping(overlay, "penalty_overlay")
            where = "row 0"
            penalties.presence = clamped(config.presence_penalty, "presence_penalty")
            penalties.frequency = clamped(config.frequency_penalty, "frequency_penalty")
            settle_config(&block.target_settings, config)
            if draft_config is not None:
                settle_config(&block.draft_settings, draft_config)
            counted = penalties.presence != 0.0 or penalties.frequency != 0.0
            counts = sorted_numbers(token_counts, "token_counts") if counted else []
            overlays = []
            for i, overlay in enumerate(given):
                where = f"row {i}"
                overlays.append(sorted_numbers(overlay, "penalty_overlay"))
            i = 0
            where = "row 0"
            self.open_counts(counts, max(map(len, overlays)) if overlays else 0, counted)
            self.open_overlays(overlays, each, &i)
        except Exception as error:
            self.refused = error, f"row {i}" if where else ""
        # Others first look whether a rough sum says enough.
        block.target_settings.exact = block.draft_settings.exact = block.rule in (BLOCK_RULE, CASCADE)

    cdef object check_settings(self):
        """The error of `read_settings` and where it is, else None."""
        cdef Block *block = &self.block
        if self.overlays >= 0 and self.overlays != block.target.count and self.overlays != block.drafts + 1:
            return ValueError(f"penalty_overlay has {self.overlays} entries "
                              f"for {block.target.count} target rows"), ""
        # Without a row there is nothing that numbers could apply to.
        return self.refused if self.refused and (block.target.count or not self.refused[1]) else None

    cdef object open_counts(self, list counts, Py_ssize_t most, bint counted):
        """Room for penalties of these counts, of drafts, and of `most` entries of an overlay."""
        cdef Block *block = &self.block
        cdef Penalties *penalties = &block.penalties
        cdef Py_ssize_t room = len(counts) + block.drafts + 1
        cdef double count
        if most == 0 and not counted:
            return
        penalties.ids = <int64_t *>malloc(room * sizeof(int64_t))
        penalties.counts = <double *>malloc(room * sizeof(double))
        penalties.patch_ids = <int64_t *>malloc((room + most) * sizeof(int64_t))
        penalties.patches = <double *>malloc((room + most) * sizeof(double))
        if NULL in (penalties.ids, penalties.counts, penalties.patch_ids, penalties.patches):
            raise MemoryError
        for token, given in counts:
            count = given
            if not count >= 0.0:
                raise ValueError(f"token {token} has the count {given}")
            penalties.ids[penalties.filled] = any_token(token)
            penalties.counts[penalties.filled] = count
            penalties.filled += 1

    cdef object open_overlays(self, list overlays, bint each, Py_ssize_t *i):
        """One of each row, or one for all; `i` is the one that is looked at."""
        cdef Penalties *penalties = &self.block.penalties
        cdef Py_ssize_t total = sum(map(len, overlays))
        cdef double amount
        if total == 0:
            return
        penalties.overlay_each = each
        penalties.overlay_starts = <Py_ssize_t *>malloc((len(overlays) + 1) * sizeof(Py_ssize_t))
        penalties.overlay_ids = <int64_t *>malloc(total * sizeof(int64_t))
        penalties.overlays = <double *>malloc(total * sizeof(double))
        if NULL in (penalties.overlay_starts, penalties.overlay_ids, penalties.overlays):
            raise MemoryError
        total = 0
        for i[0] in range(len(overlays)):
            penalties.overlay_starts[i[0]] = total
            for token, given in overlays[i[0]]:
                amount = given
                if isnan(amount):
                    raise ValueError(f"penalty_overlay of token {token} is {given}")
                penalties.overlay_ids[total] = any_token(token)
                penalties.overlays[total] = amount
                total += 1
        penalties.overlay_starts[len(overlays)] = total

    cdef object open_sums(self):
        """Where the block rule keeps the sums of rows that it comes back to."""
        if self.block.rule == BLOCK_RULE:
            self.block.sums = <KeptSum *>calloc(2 * self.block.drafts + 1, sizeof(KeptSum))
            if self.block.sums is NULL:
                raise MemoryError

    cdef object decision(self, type kind):
        """The outcome; of the class it is given, whose constructor would only check it again."""
        cdef Block *block = &self.block
        cdef cnp.ndarray tokens = new_ids(block.emitted), tested = new_doubles(block.tested)
        memcpy(ids_of(tokens), block.out, block.emitted * sizeof(int64_t))
        memcpy(doubles(tested), block.probabilities, block.tested * sizeof(double))
        cnp.PyArray_CLEARFLAGS(tokens, cnp.NPY_ARRAY_WRITEABLE)
        cnp.PyArray_CLEARFLAGS(tested, cnp.NPY_ARRAY_WRITEABLE)
        made = PyType_GenericNew(kind, (), NULL)
        # Past the __setattr__ of a frozen class.
        PyObject_GenericSetAttr(made, "tokens", tokens)
        PyObject_GenericSetAttr(made, "accepted", block.accepted)
        PyObject_GenericSetAttr(made, "accept_probabilities", tested)
        PyObject_GenericSetAttr(made, "bonus", True if block.bonus else False)
        return made

    cdef void take_error(self):
        """Keep what was raised where the garbage collector sees it: it leads to frames that hold this."""
        if self.block.failure.error is not NULL:
            self.raised = <object>self.block.failure.error
            Py_DECREF(self.raised)
            self.block.failure.error = NULL

    cdef object error(self):
        """The exception of a block that failed, and the row that it names."""
        cdef Failure *failure = &self.block.failure
        cdef str side = "draft_q" if failure.of_draft else "target_p"
        cdef str row = f"row {failure.row}"
        if self.block.status == RAISED:
            return self.raised, row
        if self.block.status == BAD_ID and self.unreadable is not NULL and self.unreadable[failure.row]:
            token = operator.index((<object>self.block.given_tokens)[failure.row])
            return IndexError(f"token id {token} is outside [0, {failure.n})"), row
        told = told_error(&self.block)
        if told is not None:
            return told
        if self.block.status == BAD_LOGITS:
            return bad_logits(self.row_values(failure), "softmax"), row
        if self.block.rule == TYPICAL and failure.row < self.block.drafts:
            side = "distribution"  # the entropy's, which is asked for after p(x)
        return bad_probabilities(self.row_values(failure), side), row

    @cython.boundscheck(True)  # the caller's lists may shrink meanwhile
    cdef object row_values(self, Failure *failure):
        cdef Side *side = &self.block.draft if failure.of_draft else &self.block.target
        cdef Row row
        if side.kind == MATRIX:
            row = side.first
            row.data += failure.row * side.stride
        else:
            _owner = open_row((<object>side.rows)[failure.row], "logits", &row)
            row.patches = 0
        if not failure.of_draft:
            patch(&self.block.penalties, failure.row, &row)
        return elements_of(&row)


cdef object require_rows(Py_ssize_t count, Py_ssize_t drafts):
    if count != drafts and count != drafts + 1:
        raise ValueError(f"target has {count} rows for {drafts} drafts; "
                         f"expected {drafts + 1}, or {drafts} without a bonus row")


cdef tuple told_error(const Block *block):
    """The exception that a failed block tells without its rows, and the row that it names; or None."""
    cdef const Failure *failure = &block.failure
    cdef str side = "draft_q" if failure.of_draft else "target_p"
    cdef str row = f"row {failure.row}"
    if block.status == NO_ROOM:
        return MemoryError(), ""
    if block.status == BAD_ID or block.status == BAD_PENALTY_ID:
        return IndexError(f"token id {failure.token} is outside [0, {failure.n})"), row
    if block.status == BAD_LENGTH:
        return ValueError(f"target_p has {failure.n} entries, draft_q {failure.m}"), row
    if block.status == NOT_DRAWABLE:
        return ValueError(f"token {failure.token} cannot have been drafted from draft_q, "
                          f"where its probability is 0"), row
    # A cascade walks the rows of its draft, and knows the entry too.
    if block.status == BAD_VALUE or (block.status == BAD_ROW and failure.of_draft and block.rule == CASCADE):
        return ValueError(f"{side} must be finite and not negative: "
                          f"entry {failure.token} is {failure.value}"), row
    if block.status == WITHOUT_MASS:
        return ValueError("neither the residual nor target_p has positive mass"), row
    return None


cdef object elements_of(const Row *row):
    """A row in float64, whatever its type and its patches are."""
    cdef Py_ssize_t i
    values = np.empty(row.n)
    for i in range(row.n):
        values[i] = element(row, i)
    for i in range(row.patches):
        values[row.patch_ids[i]] = row.patch_values[i]
    return values


cdef bint is_sequence(object value) except -1:
    """Whether it holds entries by number. Texts and mappings do not."""
    # One class at a time: Cython drops the errors of isinstance with a tuple, and Mapping's runs Python code.
    if value is None or isinstance(value, dict) or isinstance(value, str) or isinstance(value, bytes):
        return False
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, Mapping)


cdef list sorted_numbers(object mapping, str name):
    """The pairs (id, number) of a mapping in ascending order."""
    found = plain_numbers(mapping, name)
    # Two keys of the caller's may be the same id: the last counts.
    return sorted((found if type(found) is dict else dict(found or ())).items())


cdef int64_t any_token(object token) except -1:
    """An id that some row may have."""
    cdef int overflow = 0
    cdef long long found = PyLong_AsLongLongAndOverflow(token, &overflow)
    if overflow or found < 0:
        raise IndexError(f"token id {token} is outside of any vocabulary")
    return found


cdef object settle_config(Settings *settings, object config):
    settings.temperature = real(config.temperature, "temperature")
    if isnan(settings.temperature):
        raise ValueError("temperature is nan")
    settings.top_p = nucleus_mass(real(config.top_p, "top_p"))
    settings.k = ranks_kept(config.top_k, PY_SSIZE_T_MAX)  # off where a row is no longer, once one is read


# ---- calls ---------------------------------------------------------------------------------------------


cdef object attach_stream(OpenBlock opened, object generator):
    opened.generator = generator.bit_generator
    opened.block.stream.bits = bitgen_of(opened.generator)


def verify_block(target, draft, draft_tokens, generator, tuple rule, bint check_draft, tuple settings,
                 type kind):
    """One block with a plain generator, as a decision of the class that is given.

    Settings are those of logits: config, draft config, token counts, overlay; None of probabilities. An error
    comes back as (exception, where), for the caller to raise.
    """
    cdef OpenBlock opened = OpenBlock.__new__(OpenBlock)
    cdef Workspace space
    opened.open(target, draft, draft_tokens, rule, check_draft, settings)
    refused = opened.check_settings()
    if refused is not None:
        return refused
    attach_stream(opened, generator)
    memset(&space, 0, sizeof(Workspace))
    lock = opened.generator.lock
    # One hold of the lock for the whole block, so that another thread cannot draw in between.
    lock.acquire()
    try:
        with nogil:
            opened.block.status = run(&opened.block, &space)
            free_workspace(&space)
    finally:
        lock.release()
    opened.take_error()
    if opened.block.status != FINE:
        return opened.error()
    return opened.decision(kind)


cdef bint trim(const char *ids, Py_ssize_t stride, Py_ssize_t *count) noexcept nogil:
    """Leave the padding behind `count` ids away; False where there is some among the ids."""
    cdef Py_ssize_t i, kept = count[0]
    while kept and (<const int64_t *>(ids + (kept - 1) * stride))[0] == -1:
        kept -= 1
    count[0] = kept
    for i in range(kept):
        if (<const int64_t *>(ids + i * stride))[0] == -1:
            return False
    return True


@cython.boundscheck(True)
cdef Py_ssize_t plain_ids(list ids) except -2:
    """How many ids stand before the padding of a list; -1 where one is not a plain int of 64 bits."""
    cdef Py_ssize_t i, kept = 0
    cdef int overflow
    cdef bint padded = False
    for i in range(len(ids)):
        token = ids[i]
        if not PyLong_CheckExact(token):
            return -1
        padding = PyLong_AsLongLongAndOverflow(token, &overflow) == -1
        if overflow or (padded and not padding):
            return -1
        padded = padding
        kept += not padding
    return kept


@cython.boundscheck(True)
def plain_tokens(given):
    """Ids of a batch, their numbers without and with padding, and K: what `as_batch_tokens` says of them.

    None where they are not an int64 array or a list of lists of int, or not in order.
    """
    cdef cnp.ndarray array
    cdef list kept = [], padded = []
    cdef Py_ssize_t b, K = 0, count
    if type(given) is list:
        for b in range(len(given)):
            ids = given[b]
            if type(ids) is not list:
                return None
            count = plain_ids(ids)
            if count < 0:
                return None
            kept.append(count)
            padded.append(len(ids))
            K = max(K, len(ids))
        return given, kept, padded, K
    if not (cnp.PyArray_CheckExact(given) and cnp.PyArray_NDIM(<cnp.ndarray>given) == 2
            and cnp.PyArray_TYPE(<cnp.ndarray>given) == cnp.NPY_INT64
            and cnp.PyArray_ISALIGNED(<cnp.ndarray>given) and cnp.PyArray_ISNOTSWAPPED(<cnp.ndarray>given)):
        return None
    array = <cnp.ndarray>given
    K = cnp.PyArray_DIM(array, 1)
    for b in range(cnp.PyArray_DIM(array, 0)):
        count = K
        if not trim(<const char *>cnp.PyArray_DATA(array) + b * cnp.PyArray_STRIDE(array, 0),
                    cnp.PyArray_STRIDE(array, 1), &count):
            return None
        kept.append(count)
    return array, kept, [K] * len(kept), K


@cython.boundscheck(True)
def plain_counts(rows, list kept, list padded, Py_ssize_t K, bint of_target, batch_type):
    """How many of the rows of each sequence count: what `as_sequences` says of them.

    None where they are neither one array nor a list of matrices, batches, lists and tuples, or do not fit.
    """
    cdef Py_ssize_t b, B = len(kept), count
    cdef list counts
    if cnp.PyArray_CheckExact(rows):
        if cnp.PyArray_NDIM(<cnp.ndarray>rows) != 3 or cnp.PyArray_DIM(<cnp.ndarray>rows, 0) != B:
            return None
        count = cnp.PyArray_DIM(<cnp.ndarray>rows, 1)
        if count == K:
            return kept
        return [before + 1 for before in kept] if of_target and count == K + 1 else None
    if type(rows) is not list or len(rows) != B:
        return None
    counts = []
    for b in range(B):
        given = rows[b]
        if cnp.PyArray_CheckExact(given) and cnp.PyArray_NDIM(<cnp.ndarray>given) == 2:
            count = cnp.PyArray_DIM(<cnp.ndarray>given, 0)
        elif type(given) is list or type(given) is tuple or type(given) is batch_type:
            count = len(given)
        elif given is None and not of_target:
            count = 0
        else:
            return None
        if of_target:
            counts.append(kept[b] + 1 if count == padded[b] + 1 else count)
        else:
            counts.append(kept[b] if count == padded[b] else count)
    return counts


@cython.boundscheck(True)  # the caller's lists may shrink meanwhile
def open_blocks(targets, list target_counts, drafts, list draft_counts, tokens, list token_counts,
                list streams, tuple rule, bint check_draft, bint from_logits, configs, draft_configs, counts,
                overlays):
    """Blocks of a batch, opened and checked; a stream is a generator or a pair (seed, position).

    Rows are one array or a sequence, ids as well. Gives the blocks, or (exception, where, sequence).
    """
    cdef OpenBlock opened
    cdef list blocks = [], settled = []
    cdef Py_ssize_t b
    cdef Stack target_rows, draft_rows
    cdef bint matrix = cnp.PyArray_CheckExact(tokens)
    if drafts is None:
        drafts = [None] * len(target_counts)
    elif not cnp.PyArray_Check(drafts):
        drafts = list(drafts)
    # All that may run code of the caller's, before the address of a row is taken.
    for b in range(len(target_counts)):
        opened = OpenBlock.__new__(OpenBlock)
        settled.append(opened)
        try:
            opened.open_rule(rule, check_draft, from_logits)
            if matrix:
                opened.copy_tokens(<cnp.ndarray>tokens, b, token_counts[b])
            else:
                opened.open_tokens(tokens[b], None, token_counts[b])
            if from_logits:
                settings = draft_configs[b] if cnp.PyArray_Check(drafts) or drafts[b] is not None else None
                opened.read_settings(configs[b], settings, counts[b], overlays[b])
                opened.open_sums()
        except Exception as error:
            return error, "", b
    targets = open_stack(targets, &target_rows)
    drafts = open_stack(drafts, &draft_rows)
    for b in range(len(target_counts)):
        opened = settled[b]
        try:
            if target_rows.is_array:
                opened.block.target = target_rows.side
                opened.block.target.first.data += b * target_rows.step
                opened.kept.append(targets)
            else:
                open_side(targets[b], "target", &opened.block.target, from_logits, opened.kept)
            opened.check_target(target_counts[b])
            if draft_rows.is_array:
                opened.block.draft = draft_rows.side
                opened.block.draft.first.data += b * draft_rows.step
                opened.kept.append(drafts)
                opened.check_draft_rows(draft_counts[b])
            elif drafts[b] is None:
                opened.block.draft.kind = POINTS
            else:
                open_side(drafts[b], "draft", &opened.block.draft, from_logits, opened.kept)
                opened.check_draft_rows(draft_counts[b])
        except Exception as error:
            return error, "", b
        refused = opened.check_settings()
        if refused is not None:
            return (*refused, b)
        stream = streams[b]
        if type(stream) is tuple:
            opened.block.stream.seed = stream[0]
            opened.block.stream.position = stream[1]
        else:
            attach_stream(opened, stream)
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


def holding_generators(list blocks, call):
    """Make a call while no other thread can draw from the generators of opened blocks.

    Their locks are taken here and not by the workers of an executor: one that this thread has taken already
    would keep a worker waiting for ever.
    """
    cdef OpenBlock opened
    cdef list held = []
    generators = {id(opened.generator): opened.generator for opened in blocks if opened.generator is not None}
    try:
        # In an order of their own, so that two calls that share generators cannot wait for each other.
        for key in sorted(generators):
            lock = generators[key].lock
            lock.acquire()  # an interrupt while it waits leaves none of the others locked
            held.append(lock)
        call()
    finally:
        for lock in held:
            lock.release()


@cython.boundscheck(True)  # the caller's lists may shrink meanwhile
def run_blocks(list blocks, Py_ssize_t first, Py_ssize_t last):
    """Verify a range of opened blocks, whose generators are held, with one release of the GIL."""
    cdef Py_ssize_t b
    cdef Workspace space
    cdef OpenBlock opened
    cdef Block **range_of = <Block **>malloc((last - first) * sizeof(Block *))
    if range_of is NULL:
        raise MemoryError
    try:
        for b in range(first, last):
            opened = blocks[b]
            range_of[b - first] = &opened.block
        memset(&space, 0, sizeof(Workspace))
        with nogil:
            for b in range(last - first):
                range_of[b].status = run(range_of[b], &space)
            free_workspace(&space)
    finally:
        free(range_of)
    for b in range(first, last):
        opened = blocks[b]
        opened.take_error()


@cython.boundscheck(True)  # the caller's lists may shrink meanwhile
def collect_blocks(list blocks, Py_ssize_t drafts):
    """Results as padded arrays, or (exception, where, sequence) of the first block that failed."""
    cdef OpenBlock opened
    cdef Py_ssize_t b, B = len(blocks)
    cdef cnp.ndarray tokens = np.full((B, drafts + 1), -1, dtype=np.int64)
    cdef cnp.ndarray num_tokens = new_ids(B), accepted = new_ids(B)
    cdef cnp.ndarray probabilities = np.full((B, drafts), np.nan)
    for b in range(B):
        opened = blocks[b]
        if opened.block.status != FINE:
            return (*opened.error(), b)
        ids_of(num_tokens)[b] = opened.block.emitted
        ids_of(accepted)[b] = opened.block.accepted
        memcpy(ids_of(tokens) + b * (drafts + 1), opened.block.out, opened.block.emitted * sizeof(int64_t))
        memcpy(doubles(probabilities) + b * drafts, opened.block.probabilities,
               opened.block.tested * sizeof(double))
    return tokens, num_tokens, accepted, probabilities
