from mtplx._csampling.blocks cimport Side

# How the rows of one side are reached; nothing of their content is looked at. Returns what to keep alive.
cdef object open_side(object rows, str name, Side *side, bint logits, list kept)
