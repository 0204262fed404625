"""A tournament: the greatest of many numbers of at least 0, kept while single ones change.

Numbers meet in matches of seven, the winners meet again, and so on: six matches for 100,000 numbers. A change rises only as far
as it changes a winner, which is rarely more than one match. The block of memory has no pointers and lists the matches that
changed in a commit, so that a copy can follow without reading the rest.
"""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcmp, memcpy, memset


cdef inline int32_t *_dirty(const tournament_t *tournament) noexcept nogil:
    return <int32_t *> (tournament_matches(tournament) + tournament.n_matches)


cdef tournament_t _laid_out(int64_t n_entries) noexcept nogil:
    """The first match of each level, and how many levels and matches there are."""
    cdef tournament_t plan
    memset(&plan, 0, sizeof(plan))
    while plan.n_levels == 0 or n_entries > 1:
        n_entries = (n_entries + TOURNAMENT_FAN - 1) // TOURNAMENT_FAN
        plan.begins[plan.n_levels] = plan.n_matches
        plan.n_levels += 1
        plan.n_matches += <int32_t> n_entries
    return plan


cdef int64_t tournament_bytes(int64_t n_entries) noexcept nogil:
    cdef int64_t matches = _laid_out(n_entries).n_matches * <int64_t> (sizeof(match_t) + sizeof(int32_t))
    return tournament_padded(sizeof(tournament_t)) + tournament_padded(matches)


cdef void tournament_initialise(tournament_t *tournament, int64_t n_entries) noexcept nogil:
    """All numbers are 0."""
    memset(tournament, 0, tournament_bytes(n_entries))
    tournament[0] = _laid_out(n_entries)
    tournament.sequence = 1


cdef inline int64_t _winner(const match_t *match) noexcept nogil:
    cdef int64_t most = match.values[0]
    cdef int32_t i
    for i in range(1, TOURNAMENT_FAN):
        most = max(most, match.values[i])
    return most


cdef void tournament_set(tournament_t *tournament, int32_t entry, int64_t value) noexcept nogil:
    """Change one number, and every winner that this changes."""
    cdef match_t *match
    cdef const match_t *match_above
    cdef int32_t level, index
    cdef int64_t before, winner
    for level in range(tournament.n_levels):
        index = tournament.begins[level] + entry // TOURNAMENT_FAN
        match = &tournament_matches(tournament)[index]
        before = match.values[entry % TOURNAMENT_FAN]
        if before == value:
            return
        if match.dirty_at != tournament.sequence:
            match.dirty_at = tournament.sequence
            _dirty(tournament)[tournament.n_dirty] = index
            tournament.n_dirty += 1
        match.values[entry % TOURNAMENT_FAN] = value
        entry = entry // TOURNAMENT_FAN
        winner = tournament.most
        if level + 1 < tournament.n_levels:
            match_above = &tournament_matches(tournament)[tournament.begins[level + 1] + entry // TOURNAMENT_FAN]
            winner = match_above.values[entry % TOURNAMENT_FAN]
        if value < winner:
            if before < winner:
                return
            value = _winner(match)
    tournament.most = value


cdef void tournament_catch_up(tournament_t *target, const tournament_t *source) noexcept nogil:
    """Bring `target`, which is one commit behind, up to `source`. Idempotent: values are copied, not added."""
    cdef int32_t i, index
    memcpy(target, source, sizeof(tournament_t))
    for i in range(source.n_dirty):
        index = _dirty(source)[i]
        tournament_matches(target)[index] = tournament_matches(source)[index]


cdef bint tournament_can_be_followed(const tournament_t *source, int64_t n_entries) noexcept nogil:
    """Whether tournament_catch_up and tournament_set stay within a block that another process wrote."""
    cdef tournament_t plan = _laid_out(n_entries)
    cdef int32_t i
    if source.n_levels != plan.n_levels or source.n_matches != plan.n_matches or memcmp(
            source.begins, plan.begins, plan.n_levels * sizeof(int32_t)) != 0 or not 0 <= source.n_dirty <= plan.n_matches:
        return False
    for i in range(source.n_dirty):
        if not 0 <= _dirty(source)[i] < plan.n_matches:
            return False
    return True
