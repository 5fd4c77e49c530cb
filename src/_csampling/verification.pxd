from mtplx._csampling.arrays cimport Row
from mtplx._csampling.blocks cimport Block, Side

# How the rows of one side are reached; nothing of their content is looked at. Returns what to keep alive.
cdef object open_side(object rows, str name, Side *side, bint logits, list kept)

# The exception that a failed block tells without its rows, and the row that it names; or None.
cdef tuple told_error(const Block *block)

# A row in float64, whatever its type and its patches are.
cdef object elements_of(const Row *row)
