"""Owner of the kernel table in use, and of the counters of certificates that fell back."""

import os

from libc.stdint cimport uint64_t

cdef uint64_t counters[CERTIFICATES]
fallbacks = counters
table = select_kernels(NULL)

cdef dict NAMES = {
    "nucleus_boundary": NUCLEUS_BOUNDARY,
    "nucleus_against_sum": NUCLEUS_AGAINST_SUM,
    "rank_tie": RANK_TIE,
    "categorical_draw": CATEGORICAL_DRAW,
    "correction_draw": CORRECTION_DRAW,
    "accept_test": ACCEPT_TEST,
    "rough_draw": ROUGH_DRAW,
    "one_pass_draw": ONE_PASS_DRAW,
    "keep_test": KEEP_TEST,
    "typical_threshold": TYPICAL_THRESHOLD,
    "cascade_distance": CASCADE_DISTANCE,
    "division_bracket": DIVISION_BRACKET,
    "division_draw": DIVISION_DRAW,
}


def active_isa():
    """Name of the instruction set in use."""
    return table.isa.decode()


def available_isas():
    """Names of the instruction sets that were built and that this CPU can run, best first."""
    cdef int i = 0
    cdef list names = []
    while built_kernels(i) is not NULL:
        if select_kernels(built_kernels(i)) is not NULL:
            names.append(built_kernels(i).decode())
        i += 1
    return names


def use_isa(str name):
    """Switch every kernel of the process to the named instruction set; for tests and benchmarks."""
    global table
    cdef bytes encoded = name.encode()
    cdef const kernels *chosen = select_kernels(encoded)
    if chosen is NULL:
        known = ", ".join(available_isas())
        raise ValueError(f"instruction set {name!r} is not available; there are {known}")
    table = chosen


def fallback_counts():
    """How often each certificate has fallen back to the reference's own order since the import."""
    return {name: counters[<int>which] for name, which in NAMES.items()}


if os.environ.get("MTPLX_ISA"):
    use_isa(os.environ["MTPLX_ISA"])
