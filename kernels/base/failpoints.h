/* The failpoints of a build with FASTPS_HOOKS=1; every other build compiles them to nothing.
 *
 * Each access to shared memory by the protocol calls one of three macros just before it: fps_failpoint_load and
 * fps_failpoint_store for atomic accesses, and FPS_FAILPOINT for a store that needs no order of its own: a descriptor, a record, a
 * work item, scheduler state, a fold's output. A test then counts stores and dies at the n-th, or a seeded scheduler runs another
 * coroutine there. Mutants are deliberate faults: switching one on shows that a check finds it. */
#ifndef FPS_FAILPOINTS_H
#define FPS_FAILPOINTS_H

/* Name, and what is wrong. The order is the number. */
#define FPS_MUTANTS(MUTANT)                                                                                              \
    MUTANT(KEEP_LOCK, "keep-turn", "a released lock is not written as free")                                             \
    MUTANT(TAKE_WITHOUT_COMPARING, "take-without-comparing", "a lock is taken by a load and a store")                    \
    MUTANT(FORGET_PENDING, "forget-pending", "a lane that finds the lock taken does not set PENDING")                    \
    MUTANT(FLIP_FIRST, "flip-first", "the commit word is flipped before record and cursors are written")                 \
    MUTANT(FORGET_CURSOR, "forget-cursor", "a folded push stays in front of its lane's cursor")                          \
    MUTANT(FORGET_RECHECK, "forget-recheck", "a pull does not read the commit word again after its pin")                 \
    MUTANT(FORGET_PINS, "forget-pins", "a fold may write a buffer that is pinned")                                       \
    MUTANT(ACKNOWLEDGE_FIRST, "acknowledge-first", "heads move before the fold has read the slots")                      \
    MUTANT(TAIL_FIRST, "tail-first", "the tail is released before the descriptor is written")                            \
    MUTANT(FORGET_HELPERS, "forget-helpers", "a combiner does not wait for the helpers of its fold")                     \
    MUTANT(DONE_FIRST, "done-first", "a helper marks its chunk as done before it has folded it")                         \
    MUTANT(FORGET_HEADS, "forget-heads", "recovery of a lock does not write the words that follow from its last commit") \
    MUTANT(BREAK_AT_ONCE, "break-at-once", "recovery of a lock does not wait for the helpers of its fold")               \
    MUTANT(FORGET_GENERATION, "forget-generation", "a dead worker's mark hits the lane's present owner")                  \
    MUTANT(STATE_IN_PLACE, "state-in-place", "the rule's state is written where it is read")                             \
    MUTANT(FORGET_READERS, "forget-readers", "a fold may write a buffer that a reader pins")                             \
    MUTANT(FORGET_READY, "forget-ready", "a fold may write a buffer that was fetched and waits to be read")              \
    MUTANT(ROW_FIRST, "row-first", "a fold writes rows before the log says that it has them")                            \
    MUTANT(FORGET_UNDO, "forget-undo", "recovery of a lock does not roll a fold's rows back")                            \
    MUTANT(KEEP_UNDO, "keep-undo", "a log is rolled back although its fold was committed")                               \
    MUTANT(ROWS_LATE, "rows-late", "a fold writes its rows after the flip")                                              \
    MUTANT(FORGET_WANTED, "forget-wanted", "a commit does not look whether readers sleep")                               \
    MUTANT(LOOK_FIRST, "look-first", "a reader looks at the version before it says that it sleeps for one")              \
    MUTANT(EVENT_LATE, "event-late", "a reader reads the event after it said that it sleeps")                            \
    MUTANT(SAME_WORKSPACE, "same-workspace", "the taker of a stopped combiner's lock writes where that one may still write") \
    MUTANT(FOLLOW_COMMIT, "follow-commit", "a combiner that was stopped goes on in the workspace of the lock's taker")    \
    MUTANT(FORGET_CONFIRM, "forget-confirm", "a combiner folds without a look at whether the lock is still its own")      \
    MUTANT(FORGET_LEFT, "forget-left", "a fold may write a buffer that a stopped combiner may still write")               \
    MUTANT(BACK_EARLY, "back-early", "a workspace that was left is used again while a helper may still write there")      \
    MUTANT(HEADS_BACK, "heads-back", "a combiner that was stopped writes heads and grants that are lower than those there") \
    MUTANT(FIRST_CLOCK, "first-clock", "a worker that joins gets the first shard's clock in all shards")                 \
    MUTANT(ONE_COUNT, "one-count", "a worker that joined takes its count of steps for the clock of every shard") \
    MUTANT(FORGET_RING, "forget-ring", "the owner after one that was expelled begins in the ring as it is")              \
    MUTANT(READ_EXPELLED, "read-expelled", "pushes of an expelled worker that wait for their sum are folded")              \
    MUTANT(FORGET_CALL, "forget-call", "a worker whose job has a server posts, and does not call the server")             \
    MUTANT(CALL_LATE, "call-late", "a server reads the event after it has combined, and not before")                      \
    MUTANT(FORGET_TAKING_OVER, "forget-taking-over", "the workers do not combine when their server has died")             \
    MUTANT(SERVE_ON, "serve-on", "a server does not look for workers that have died")                                    \
    MUTANT(WRITE_THROUGH, "write-through", "what a script writes to its model reaches the memory that others read")   \
    MUTANT(CARRY_LATE, "carry-late", "what a version carries is written after its flip")                                 \
    MUTANT(GIVE_BACK_BLIND, "give-back-blind", "readers' buffers are given back without a look at which are in use") \
    MUTANT(SPARE_PINNED, "spare-pinned", "a version that is written as a whole may go into a buffer that is pinned")      \
    MUTANT(PUBLISH_FIRST, "publish-first", "a publisher releases its version before it has written it")

enum {
#define FPS_MUTANT_NUMBER(symbol, name, text) FPS_MUTANT_##symbol,
    FPS_MUTANTS(FPS_MUTANT_NUMBER)
#undef FPS_MUTANT_NUMBER
        FPS_N_MUTANTS
};

#ifdef FASTPS_HOOKS

#include <signal.h>
#include <stdint.h>
#include <unistd.h>

typedef struct {
    int64_t accesses, stores; /* so far, in this process */
    int64_t die_at;           /* die by SIGKILL just before this store, counted from 1; 0: never */
    int64_t stop_at;          /* the same, but stop by SIGSTOP */
    int64_t mutant;           /* the one that is switched on, or -1 */
    /* A simulated world, or NULL: what happens at an access, and instead of the kernel's futex. */
    void (*at_access)(void);
    void (*sleep)(const uint32_t *event, uint32_t seen, int64_t slice_ns);
    void (*wake)(const uint32_t *event);
    void (*yield)(void);
    int64_t shared_least; /* floats that a fold moves, from which on it is shared */
} fps_failpoint_table;

/* One table for all extension modules of the process, although each is loaded with its symbols kept local: the loader makes a
 * unique symbol one for the whole process. */
#ifdef FPS_FAILPOINTS_ELSEWHERE /* in another file of this module */
extern fps_failpoint_table fps_failpoints;
#else
__asm__(".type fps_failpoints, %gnu_unique_object");
fps_failpoint_table fps_failpoints = {.mutant = -1, .shared_least = 64};
#endif

static inline void fps_failpoint_load(void) {
    fps_failpoints.accesses++;
    if (fps_failpoints.at_access) fps_failpoints.at_access();
}
static inline void fps_failpoint_store(void) {
    if (++fps_failpoints.stores == fps_failpoints.die_at) kill(getpid(), SIGKILL);
    if (fps_failpoints.stores == fps_failpoints.stop_at) kill(getpid(), SIGSTOP);
    fps_failpoint_load();
}
#define FPS_FAILPOINT() fps_failpoint_store()
#define fps_mutant(number) (fps_failpoints.mutant == (number))
/* In a simulated world its function is called, and the kernel's is not. */
#define FPS_FAILPOINT_INSTEAD(function, ...)                                                                             \
    do {                                                                                                                 \
        if (fps_failpoints.function) {                                                                                   \
            fps_failpoints.function(__VA_ARGS__);                                                                        \
            return;                                                                                                      \
        }                                                                                                                \
    } while (0)

#else

#define fps_failpoint_load() ((void)0)
#define fps_failpoint_store() ((void)0)
#define FPS_FAILPOINT() ((void)0)
#define fps_mutant(number) 0
#define FPS_FAILPOINT_INSTEAD(function, ...) ((void)0)

#endif
#endif
