# The greatest of many numbers, kept while single ones change.

from libc.stdint cimport int32_t, int64_t

cdef enum:
    TOURNAMENT_FAN = 7      # with dirty_at, a match fills a cache line
    TOURNAMENT_LEVELS = 12  # enough for any int32 number of entries

# The entries of a match are numbers, or the winners of the matches below it.
cdef struct match_t:
    int64_t dirty_at      # commit in which it last changed
    int64_t values[TOURNAMENT_FAN]

cdef struct tournament_t:
    int64_t most            # the greatest number
    int64_t sequence        # commits so far
    int32_t n_matches, n_levels, n_dirty
    int32_t begins[TOURNAMENT_LEVELS]  # the first match of each level; level 0 holds the numbers

cdef int64_t tournament_bytes(int64_t n_entries) noexcept nogil
cdef void tournament_initialise(tournament_t *tournament, int64_t n_entries) noexcept nogil
cdef void tournament_set(tournament_t *tournament, int32_t entry, int64_t value) noexcept nogil
cdef void tournament_catch_up(tournament_t *target, const tournament_t *source) noexcept nogil
cdef bint tournament_can_be_followed(const tournament_t *source, int64_t n_entries) noexcept nogil


cdef inline int64_t tournament_padded(int64_t size) noexcept nogil:
    """To whole cache lines."""
    return (size + 63) & ~<int64_t> 63


cdef inline match_t *tournament_matches(const tournament_t *tournament) noexcept nogil:
    return <match_t *> (<char *> tournament + tournament_padded(sizeof(tournament_t)))


cdef inline void tournament_begin(tournament_t *tournament) noexcept nogil:
    """Begin the changes of a new commit: nothing is dirty yet."""
    tournament.sequence += 1
    tournament.n_dirty = 0
