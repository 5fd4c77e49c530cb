from libc.stdint cimport uint64_t

from mtplx._csampling.draws cimport bitgen_t

# Lanes of a keyed stream; lanes below CORRECTION_LANE are the coins of positions.
cdef uint64_t CORRECTION_LANE, BONUS_LANE

# Where uniforms come from: a bit generator whose lock is held, or (seed, position) and a lane.
cdef struct Stream:
    bitgen_t *bits     # NULL: keyed
    uint64_t seed
    uint64_t position

# The first random() of np.random.Philox(key=[seed, position], counter=[0, lane, 0, 0]).
cdef double keyed_uniform(uint64_t seed, uint64_t position, uint64_t lane) noexcept nogil


# The next uniform of a generator, or the one of this lane.
cdef inline double next_uniform(const Stream *stream, uint64_t lane) noexcept nogil:
    if stream.bits is not NULL:
        return stream.bits.next_double(stream.bits.state)
    return keyed_uniform(stream.seed, stream.position, lane)
