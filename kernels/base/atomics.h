/* Every acquire, release, pause and futex of fastps is in this file, and nowhere else.
 *
 * Each function names the one word of the protocol that it serves. A release and the
 * acquire that reads it share a label. Label, word, publisher -> reader, and what is published:
 *
 *   [TAIL]     lane.tail      producer -> combiner       the descriptors below it, and the slots that they name
 *   [EARLY]    lane.early     producer -> agent          the gradients of the parts that it counts are in the slot of the next push
 *   [HEAD]     lane.head      combiner -> producer       that slots below it were read for the last time; never goes back
 *   [LOCK]     lock           combiner -> next combiner  everything that the combiner wrote under the lock
 *   [PENDING]  lock's flag    pusher   -> combiner       the pusher's [TAIL] to a combiner that may already have read it
 *   [ITEM]     lock           combiner -> taker          the work item, and with it which buffers the combiner writes from then on
 *   [COMMIT]   commit         combiner -> everyone       weights, rule state, record and scheduler state of one version
 *   [PIN]      lane.pin       reader   -> combiner       which buffer is being read; paired with [COMMIT], see below
 *   [READERS]  readers.ready  reader   -> combiner       how many readers' pins count, and how many buffers more there are
 *   [WANTED]   readers.wanted reader   -> combiner       the version that readers sleep for; paired with [COMMIT], see below
 *   [GRANT]    lane.granted   combiner -> worker         the permission, after the commit that earned it; never goes back
 *   [EVENT]    lane.event     combiner -> sleeper        the futex word; paired with lane.sleeping, see below
 *   [EVENT]    readers.event  combiner -> readers        the futex word of all readers that sleep; moves where [WANTED] is taken
 *   [STATE]    lane.state     member   -> everyone       that a worker attached, left or failed, and its message
 *   [WORK]     work.ticket    combiner -> helpers        a fold in the making; a claim takes one chunk of it
 *   [HELP]     lane.helping   helper   -> combiner       that chunks may be in this lane's hands; 0: and what it wrote
 *   [CHUNK]    work.done      helper   -> combiner       a chunk's results; one that is missing is folded again
 *   [UNDO]     undo.bytes     combiner -> next combiner  the old words of rows, before a fold writes these rows in place
 *   [BLOCK]    rank.written,  rank     -> other ranks    blocks of a collective that a rank has written, reduced or read;
 *              .reduced, .read                           paired with rank.sleeping, see below
 *   [USERS]    mapping.users  user     -> last user      that a view or tensor of this process's mapping is used no more
 *   [THAW]     segment.length member   -> everyone       a frozen parameter's values in every buffer; under all shard locks
 *   [VIEW]     view.begin     maker    -> fault handler  the bounds of a private view; null: it is unmapped
 *
 * Five places need more than acquire and release, because each side writes one word and then reads the other's:
 *   pin and commit: the reader exchanges its pin and then re-reads commit; the combiner flips commit and later reads the pins.
 *   ready and commit: a reader raises ready, pins and then reads commit; the combiner flips commit and later reads ready.
 *   sleeping and event: the sleeper sets sleeping and then re-reads event; the combiner adds to event and then reads sleeping.
 *   wanted and commit: a reader lowers wanted and then reads commit; the combiner flips commit and then reads wanted.
 *   sleeping and blocks: the sleeper sets sleeping and re-reads the counts; a rank exchanges its count and reads sleeping.
 * All these operations are seq_cst read-modify-writes or loads, so at least one side sees the other. There is no
 * standalone fence anywhere: ThreadSanitizer cannot model one.
 *
 * A build with FASTPS_HOOKS=1 runs a failpoint before each access, which a test uses to count, to die at the n-th store, or to
 * let a seeded scheduler run another worker. A build with FASTPS_DEBUG=1 checks FPS_ASSERT. */
#ifndef FPS_ATOMICS_H
#define FPS_ATOMICS_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/failpoints.h"

#ifdef FASTPS_DEBUG
#define FPS_ASSERT(condition)                                                                                            \
    do {                                                                                                                 \
        if (!(condition)) {                                                                                              \
            fprintf(stderr, "fastps: invariant broken: %s (%s:%d)\n", #condition, __FILE__, __LINE__);                   \
            abort();                                                                                                     \
        }                                                                                                                \
    } while (0)
#else
#define FPS_ASSERT(condition) ((void)0)
#endif

_Static_assert(sizeof(long) == 8, "fastps needs a 64-bit machine: its commit and lock words are 64 bits wide");
_Static_assert(__atomic_always_lock_free(8, 0), "64-bit atomics must be lock-free to work between processes");

/* -- what most functions are made of: a failpoint, and one access in the order that is named ---------------------------- */
#define FPS_LOAD(name, type, order)                                                                                      \
    static inline type name(const type *word) {                                                                          \
        fps_failpoint_load();                                                                                            \
        return __atomic_load_n(word, __ATOMIC_##order);                                                                  \
    }
#define FPS_STORE(name, type, order)                                                                                     \
    static inline void name(type *word, type value) {                                                                    \
        fps_failpoint_store();                                                                                           \
        __atomic_store_n(word, value, __ATOMIC_##order);                                                                 \
    }
#define FPS_EXCHANGE(name, type, order)                                                                                  \
    static inline void name(type *word, type value) {                                                                    \
        fps_failpoint_store();                                                                                           \
        (void)__atomic_exchange_n(word, value, __ATOMIC_##order);                                                        \
    }
/* Returns whether the word was `seen`; it is `next` then. The second order is that of a word which was not. */
#define FPS_COMPARE_EXCHANGE(name, type, order, failed)                                                                  \
    static inline int name(type *word, type seen, type next) {                                                           \
        fps_failpoint_store();                                                                                           \
        return __atomic_compare_exchange_n(word, &seen, next, 0, __ATOMIC_##order, __ATOMIC_##failed);                   \
    }

/* Raises the word to `value` if it is lower: a combiner that was stopped, and whose lock was taken over, may come late. */
#define FPS_RAISE(name, type)                                                                                            \
    static inline void name(type *word, type value) {                                                                    \
        type seen = __atomic_load_n(word, __ATOMIC_RELAXED);                                                             \
        fps_failpoint_store();                                                                                           \
        if (fps_mutant(FPS_MUTANT_HEADS_BACK)) return __atomic_store_n(word, value, __ATOMIC_RELEASE);                   \
        while (seen < value && !__atomic_compare_exchange_n(word, &seen, value, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED))  \
            continue;                                                                                                    \
    }

/* -- [TAIL] ------------------------------------------------------------------------------------------------------------ */
/* Publishes to the combiner: every descriptor below `tail`, and the gradients and hyper-parameters in the slots they name. */
FPS_STORE(fps_tail_release, uint64_t, RELEASE)
FPS_LOAD(fps_tail_acquire, uint64_t, ACQUIRE)

/* [EARLY] */
FPS_STORE(fps_early_release, uint64_t, RELEASE)
FPS_LOAD(fps_early_acquire, uint64_t, ACQUIRE)

/* -- [HEAD] ------------------------------------------------------------------------------------------------------------ */
/* Publishes to the producer: nobody will fold the descriptors below `head`, nor their slots, again. */
FPS_RAISE(fps_head_raise, uint64_t)
FPS_LOAD(fps_head_acquire, uint64_t, ACQUIRE)

/* -- [LOCK] and [PENDING] ---------------------------------------------------------------------------------------------- */
FPS_LOAD(fps_lock_load, uint64_t, ACQUIRE)
/* Acquires what the last combiner released by [LOCK], and the tails of the pushers that set the flag by [PENDING]; where the owner
 * is stopped or dead, its [ITEM]. */
static inline int fps_lock_take(uint64_t *lock, uint64_t seen, uint64_t mine) {
    fps_failpoint_store();
    if (fps_mutant(FPS_MUTANT_TAKE_WITHOUT_COMPARING)) return __atomic_store_n(lock, mine, __ATOMIC_RELEASE), 1;
    return __atomic_compare_exchange_n(lock, &seen, mine, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}
/* Publishes to the next combiner: the scheduler's state, the records and the buffers that this combiner wrote. */
static inline int fps_lock_release(uint64_t *lock, uint64_t mine, uint64_t given) {
    fps_failpoint_store();
    if (fps_mutant(FPS_MUTANT_KEEP_LOCK)) return 1;
    return __atomic_compare_exchange_n(lock, &mine, given, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}
/* Publishes to the combiner: this pusher's tail. Returns the previous word. */
static inline uint64_t fps_lock_set_pending(uint64_t *lock, uint64_t flag) {
    fps_failpoint_store();
    if (fps_mutant(FPS_MUTANT_FORGET_PENDING)) return __atomic_load_n(lock, __ATOMIC_ACQUIRE);
    return __atomic_fetch_or(lock, flag, __ATOMIC_ACQ_REL);
}
/* Clear a flag of a lock that this lane holds. Of PENDING: acquires the tails of all lanes that set it; they need not set it again
 * before their next push. Compares, because the lock may be another lane's by now, and the flag with it. */
static inline int fps_lock_clear(uint64_t *lock, uint64_t seen, uint64_t flag) {
    fps_failpoint_store();
    return __atomic_compare_exchange_n(lock, &seen, seen & ~flag, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}
/* [ITEM] Publishes the work item to a lane that takes this lock over. Returns the lock word: either it is still this combiner's, and
 * a lane that takes the lock over later knows the item; or it is not, and nothing may be written. A read-modify-write, because only that
 * has a place before or after the other's. */
static inline uint64_t fps_lock_confirm(uint64_t *lock) {
    fps_failpoint_store();
    return __atomic_fetch_or(lock, 0, __ATOMIC_ACQ_REL);
}

/* -- [COMMIT] and [PIN] ------------------------------------------------------------------------------------------------ */
/* Publishes to everyone: the version's weights, rule state, record and scheduler state. seq_cst for the pin protocol. */
FPS_COMPARE_EXCHANGE(fps_commit_flip, uint64_t, SEQ_CST, SEQ_CST)
FPS_LOAD(fps_commit_load, uint64_t, SEQ_CST)
/* Ends the reads of the buffer pinned before and announces the next; what follows must re-read commit. */
FPS_EXCHANGE(fps_pin_exchange, uint64_t, SEQ_CST)
static inline uint64_t fps_pin_load(const uint64_t *pin) {
    fps_failpoint_load();
    if (fps_mutant(FPS_MUTANT_FORGET_PINS)) return 0;
    return __atomic_load_n(pin, __ATOMIC_SEQ_CST);
}

/* [READERS] Publishes to combiners: the pins of so many readers count, and so many buffers more have pages. A reader raises the
 * number before its first pin, in the one order of [COMMIT] and [PIN]: a combiner that still loads the old number has flipped
 * before that reader loads commit. */
FPS_COMPARE_EXCHANGE(fps_readers_raise, uint64_t, SEQ_CST, SEQ_CST)
FPS_LOAD(fps_readers_load, uint64_t, SEQ_CST)

/* [WANTED] Publishes to combiners: readers sleep, or are about to, for this version or a later one; 0: none does. A reader that
 * finds a low enough version writes it again: only a read-modify-write has a place in the one order of [COMMIT] and [WANTED]. */
FPS_COMPARE_EXCHANGE(fps_wanted_lower, uint64_t, SEQ_CST, SEQ_CST)
/* Loaded after each flip. A line that nobody writes while no reader sleeps. */
FPS_LOAD(fps_wanted_load, uint64_t, SEQ_CST)
/* Take the wish, by a 0. The taker then moves [EVENT]: a reader loads it before it lowers [WANTED], so a reader whose wish was taken
 * sleeps only until then. */
FPS_EXCHANGE(fps_wanted_set, uint64_t, SEQ_CST)

/* One reader at a time copies a whole version; as with pins, what follows must re-read commit. 0 where another reads. */
FPS_COMPARE_EXCHANGE(fps_reader_change, uint64_t, SEQ_CST, SEQ_CST)
FPS_LOAD(fps_reader_load, uint64_t, SEQ_CST)

/* -- [GRANT] ----------------------------------------------------------------------------------------------------------- */
/* Publishes to the worker: the commit that earned the grant happened before. */
FPS_RAISE(fps_grant_raise, int64_t)
FPS_LOAD(fps_grant_acquire, int64_t, ACQUIRE)

/* -- [EVENT] and sleeping ---------------------------------------------------------------------------------------------- */
static inline void fps_event_add(uint32_t *event) {
    fps_failpoint_store();
    (void)__atomic_fetch_add(event, 1, __ATOMIC_SEQ_CST);
}
FPS_LOAD(fps_event_load, uint32_t, SEQ_CST)
FPS_EXCHANGE(fps_sleeping_set, uint32_t, SEQ_CST)
FPS_LOAD(fps_sleeping_load, uint32_t, SEQ_CST)
/* Sleep until the event moves on from `seen`, a signal comes, or `slice_ns` has passed. The kernel compares under its own
 * lock, so an event that moved in between returns at once. */
static inline void fps_event_sleep(uint32_t *event, uint32_t seen, int64_t slice_ns) {
    FPS_FAILPOINT_INSTEAD(sleep, event, seen, slice_ns);
    struct timespec slice = {.tv_sec = slice_ns / 1000000000, .tv_nsec = slice_ns % 1000000000};
    syscall(SYS_futex, event, FUTEX_WAIT, seen, &slice, NULL, 0);
}
static inline void fps_event_wake(uint32_t *event) {
    FPS_FAILPOINT_INSTEAD(wake, event);
    syscall(SYS_futex, event, FUTEX_WAKE, 1, NULL, NULL, 0);
}
static inline void fps_event_wake_all(uint32_t *event) {
    FPS_FAILPOINT_INSTEAD(wake, event);
    syscall(SYS_futex, event, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* -- [STATE] ----------------------------------------------------------------------------------------------------------- */
FPS_LOAD(fps_state_acquire, uint32_t, SEQ_CST)
FPS_COMPARE_EXCHANGE(fps_state_change, uint32_t, SEQ_CST, SEQ_CST)

/* -- [WORK], [HELP] and [CHUNK] ---------------------------------------------------------------------------------------- */
/* Publishes to helpers: the work item, and the cleared [CHUNK] word. */
FPS_STORE(fps_ticket_release, uint64_t, RELEASE)
FPS_LOAD(fps_ticket_acquire, uint64_t, ACQUIRE)
/* Acquires the work item; releases this lane's [HELP], which precedes it: a combiner that sees the ticket exhausted sees every
 * lane that may still be at work, because claims are one chain of read-modify-writes. */
FPS_COMPARE_EXCHANGE(fps_ticket_claim, uint64_t, ACQ_REL, RELAXED)
FPS_EXCHANGE(fps_help_set, uint32_t, SEQ_CST)
static inline uint32_t fps_help_load(const uint32_t *helping) {
    fps_failpoint_load();
    if (fps_mutant(FPS_MUTANT_FORGET_HELPERS)) return 0;
    return __atomic_load_n(helping, __ATOMIC_SEQ_CST);
}
/* Takes a dead lane's word back, by a 0, if it is still that owner's: a later owner's is another number. */
FPS_COMPARE_EXCHANGE(fps_help_change, uint32_t, SEQ_CST, SEQ_CST)
static inline void fps_chunk_done(uint64_t *done, uint64_t bit) {
    fps_failpoint_store();
    (void)__atomic_fetch_or(done, bit, __ATOMIC_RELEASE);
}
FPS_LOAD(fps_chunks_acquire, uint64_t, ACQUIRE)
/* Under the shard lock, while no lane helps; [WORK] publishes it. */
FPS_STORE(fps_chunks_set, uint64_t, RELAXED)
/* Yield the core to another process: a preempted helper, or the worker that pushes next, may need it. */
static inline void fps_yield(void) {
    FPS_FAILPOINT_INSTEAD(yield);
    sched_yield();
}
/* How often a loop may still yield. A number alone is no limit: on a busy core each yield takes a time slice of every process
 * there, so that 200 of them take seconds. Therefore this reads the clock, as nothing else in the kernels does. */
#define FPS_YIELDING_NS 10000000
typedef struct {
    int left;
    int64_t began_ns; /* 0: not yet */
} fps_yields;
/* Yield the core once more; returns 0 if the loop may not, because it has yielded often or for long. */
static inline int fps_yield_again(fps_yields *yields) {
    struct timespec now;
    if (yields->left-- <= 0) return 0;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t now_ns = now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
    if (!yields->began_ns) yields->began_ns = now_ns;
    if (now_ns - yields->began_ns > FPS_YIELDING_NS) return 0;
    fps_yield();
    return 1;
}

/* -- [UNDO] ------------------------------------------------------------------------------------------------------------ */
/* Publishes to the combiner that recovers this one's lock: the logged rows below. A full barrier, and not a release: the rows
 * are written only after the count, too. */
FPS_EXCHANGE(fps_undo_publish, uint64_t, SEQ_CST)
FPS_LOAD(fps_undo_load, uint64_t, SEQ_CST)
/* Reserve bytes of the log; returns how many others had reserved. Nothing is published: each pusher allocates up to its end. */
static inline uint64_t fps_undo_reserve(uint64_t *reserved, uint64_t bytes) {
    fps_failpoint_store();
    return __atomic_fetch_add(reserved, bytes, __ATOMIC_RELAXED);
}

/* -- [BLOCK] ----------------------------------------------------------------------------------------------------------- */
/* Publishes to the other ranks: the blocks below `value` that this rank has written or reduced; or that it has read them, so
 * that their memory may be written again. */
FPS_EXCHANGE(fps_block_publish, uint64_t, SEQ_CST)
FPS_LOAD(fps_block_load, uint64_t, SEQ_CST)

/* -- [USERS]: within one process, so no failpoint ------------------------------------------------------------------------ */
/* Publishes nothing: the caller is a user already. */
static inline void fps_users_add(uint32_t *users) { __atomic_fetch_add(users, 1, __ATOMIC_RELAXED); }
/* Publishes to the last user: all that this one did with the memory. Returns whether this was the last, which acquires it. */
static inline int fps_users_drop(uint32_t *users) { return __atomic_fetch_sub(users, 1, __ATOMIC_ACQ_REL) == 1; }

/* -- [THAW] ------------------------------------------------------------------------------------------------------------ */
/* Publishes to processes that read weights without a lock: the parameter's values in every buffer. */
FPS_STORE(fps_length_release, int64_t, RELEASE)
FPS_LOAD(fps_length_acquire, int64_t, ACQUIRE)

/* -- [VIEW]: within one process ------------------------------------------------------------------------------------------ */
/* Publishes to the handler of faults: the view's bounds. */
static inline void fps_view_place(char **begin, char *place) { __atomic_store_n(begin, place, __ATOMIC_RELEASE); }
static inline char *fps_view_begin(char *const *begin) { return __atomic_load_n(begin, __ATOMIC_ACQUIRE); }
/* Publishes nothing: the thread that writes is the one that is told, or has told that one. */
static inline void fps_view_note(int *is_open, int value) { __atomic_store_n(is_open, value, __ATOMIC_RELAXED); }
static inline int fps_view_noted(const int *is_open) { return __atomic_load_n(is_open, __ATOMIC_RELAXED); }

/* -- counters that are only read, never acted upon --------------------------------------------------------------------- */
FPS_STORE(fps_counter_set, int64_t, RELAXED)
static inline int64_t fps_counter_get(const int64_t *counter) { return __atomic_load_n(counter, __ATOMIC_RELAXED); }

/* Samples drawn from an order that all workers share: each is drawn once. */
static inline uint64_t fps_drawn_add(uint64_t *drawn, uint64_t samples) {
    fps_failpoint_store();
    return __atomic_fetch_add(drawn, samples, __ATOMIC_RELAXED);
}
static inline uint64_t fps_drawn_load(const uint64_t *drawn) { return __atomic_load_n(drawn, __ATOMIC_RELAXED); }

/* Tell the core that this is a spin loop. */
static inline void fps_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#endif
}

#endif
