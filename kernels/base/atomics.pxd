# The one declaration of atomics.h for Cython. The header says what each function publishes, and to whom.

from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef extern from "base/atomics.h" nogil:
    void FPS_ASSERT(bint condition)

    void fps_tail_release(uint64_t *tail, uint64_t value)
    uint64_t fps_tail_acquire(const uint64_t *tail)
    void fps_early_release(uint64_t *early, uint64_t value)
    uint64_t fps_early_acquire(const uint64_t *early)
    void fps_head_raise(uint64_t *head, uint64_t value)
    uint64_t fps_head_acquire(const uint64_t *head)

    uint64_t fps_lock_load(const uint64_t *lock)
    int fps_lock_take(uint64_t *lock, uint64_t seen, uint64_t mine)
    int fps_lock_release(uint64_t *lock, uint64_t mine, uint64_t given)
    uint64_t fps_lock_set_pending(uint64_t *lock, uint64_t flag)
    bint fps_lock_clear(uint64_t *lock, uint64_t seen, uint64_t flag)
    uint64_t fps_lock_confirm(uint64_t *lock)

    int fps_commit_flip(uint64_t *commit, uint64_t seen, uint64_t next)
    uint64_t fps_commit_load(const uint64_t *commit)
    void fps_pin_exchange(uint64_t *pin, uint64_t value)
    uint64_t fps_pin_load(const uint64_t *pin)
    int fps_readers_raise(uint64_t *ready, uint64_t seen, uint64_t next)
    uint64_t fps_readers_load(const uint64_t *ready)
    int fps_wanted_lower(uint64_t *wanted, uint64_t seen, uint64_t next)
    uint64_t fps_wanted_load(const uint64_t *wanted)
    void fps_wanted_set(uint64_t *wanted, uint64_t value)
    int fps_reader_change(uint64_t *reader, uint64_t seen, uint64_t next)
    uint64_t fps_reader_load(const uint64_t *reader)

    void fps_grant_raise(int64_t *granted, int64_t value)
    int64_t fps_grant_acquire(const int64_t *granted)

    void fps_event_add(uint32_t *event)
    uint32_t fps_event_load(const uint32_t *event)
    void fps_sleeping_set(uint32_t *sleeping, uint32_t value)
    uint32_t fps_sleeping_load(const uint32_t *sleeping)
    void fps_event_sleep(uint32_t *event, uint32_t seen, int64_t slice_ns)
    void fps_event_wake(uint32_t *event)
    void fps_event_wake_all(uint32_t *event)

    uint32_t fps_state_acquire(const uint32_t *state)
    int fps_state_change(uint32_t *state, uint32_t seen, uint32_t next)

    void fps_ticket_release(uint64_t *ticket, uint64_t value)
    uint64_t fps_ticket_acquire(const uint64_t *ticket)
    int fps_ticket_claim(uint64_t *ticket, uint64_t seen, uint64_t next)
    void fps_help_set(uint32_t *helping, uint32_t value)
    int64_t fps_length_acquire(const int64_t *word)
    void fps_length_release(int64_t *word, int64_t value)
    uint32_t fps_help_load(const uint32_t *helping)
    int fps_help_change(uint32_t *helping, uint32_t seen, uint32_t next)
    void fps_chunk_done(uint64_t *done, uint64_t bit)
    uint64_t fps_chunks_acquire(const uint64_t *done)
    void fps_chunks_set(uint64_t *done, uint64_t value)
    void fps_yield()
    ctypedef struct fps_yields:
        int left
        int64_t began_ns
    int fps_yield_again(fps_yields *yields)

    uint64_t fps_undo_reserve(uint64_t *reserved, uint64_t bytes)

    uint64_t fps_block_load(const uint64_t *count)

    void fps_counter_set(int64_t *counter, int64_t value)
    int64_t fps_counter_get(const int64_t *counter)
    uint64_t fps_drawn_add(uint64_t *drawn, uint64_t samples)
    uint64_t fps_drawn_load(const uint64_t *drawn)
    void fps_pause()
