/* The exchange of blocks between the ranks of a process group, through memory that all of them map.
 *
 * Each rank has a line of counts and `depth` blocks, which it alone writes. A collective cuts its tensors into blocks; blocks
 * are numbered on and on, over all collectives of the group, and block g lies in place g % depth. A rank passes each block
 * through three stages, and publishes a count after each:
 *
 *   written  what the others need of this rank's tensor is in its block
 *   reduced  the part that this rank reduces (of all-reduce alone) is in its block
 *   read     what this rank needs of the others' blocks is in its own tensor; their memory may be written again
 *
 * No stage takes a lock, and stages of several blocks overlap: a rank does whatever it can do next, and sleeps where it can do
 * nothing. The caller sees to deadlines and dead ranks, because this file reads no clock: a call returns after a slice of time.
 * A rank's block carries the words of its collective, and each rank compares them with its own before it uses the block. */
#ifndef FPS_EXCHANGE_H
#define FPS_EXCHANGE_H

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "base/atomics.h"
#include "collectives/reduce.h"

#define FPS_MAX_RANKS 64
#define FPS_MAX_DEPTH 8
#define FPS_MESSAGE_BYTES 512
#define FPS_LINE 64

enum { FPS_LIVE, FPS_FAILED, FPS_LEFT }; /* a rank's state */
enum { FPS_DONE, FPS_WAITING, FPS_DIFFERS };

/* KIND(NAME, name). ALL_REDUCE_SMALL: every rank reads all tensors and reduces them itself, in one stage less. */
#define FPS_COLLECTIVE_KINDS(KIND)                                                                                       \
    KIND(BARRIER, barrier) KIND(ALL_REDUCE_SMALL, all_reduce) KIND(ALL_REDUCE, all_reduce) KIND(REDUCE, reduce)          \
    KIND(REDUCE_SCATTER, reduce_scatter) KIND(ALL_GATHER, all_gather) KIND(GATHER, gather) KIND(SCATTER, scatter)        \
    KIND(ALL_TO_ALL, all_to_all) KIND(BROADCAST, broadcast)
#define FPS_KIND_NUMBER(NAME, ...) FPS_##NAME,
enum { FPS_COLLECTIVE_KINDS(FPS_KIND_NUMBER) FPS_KINDS };
#undef FPS_KIND_NUMBER

/* What all ranks must agree on: the collective, and the bytes of one part. */
typedef struct {
    uint64_t what; /* kind, element, reduction, root: 8, 8, 8 and 16 bits from the lowest on */
    uint64_t bytes;
} fps_collective_words;

typedef struct {
    uint64_t written, reduced, read __attribute__((aligned(8))); /* [BLOCK] */
    uint64_t unused[5];
    uint32_t event, sleeping; /* the futex word of this rank, and whether it may sleep */
    uint32_t state, process_id;
    int64_t streams; /* of rank 0: whether large blocks are better written past the caches */
    uint64_t unused2[5];
    fps_collective_words words[FPS_MAX_DEPTH]; /* of the collective of each block */
    char message[FPS_MESSAGE_BYTES];           /* why it failed; written before the state */
} fps_rank;

_Static_assert(sizeof(fps_rank) % FPS_LINE == 0, "a rank's words fill whole cache lines");

typedef struct {
    fps_rank *ranks;
    char *blocks; /* rank after rank, each `depth` blocks of `block_bytes` */
    int rank, size, depth;
    int spins, yields; /* before a rank sleeps */
    int streams; /* whether this collective's blocks are written past the caches */
    int64_t block_bytes;
    uint64_t next; /* the number of the next block */
} fps_exchange;

/* One rank's side of a collective. `inputs` and `outputs` have a place for each rank, of which a kind uses some. */
typedef struct {
    int kind, root;
    int64_t bytes; /* of a part: what one rank sends to one other; of all-reduce: of the tensor */
    int64_t piece; /* bytes of a part in one block */
    int64_t element_bytes;
    fps_reduce_loop reduce;
    fps_collective_words words;
    uint64_t first, end;             /* numbers of its blocks */
    uint64_t written, reduced, read; /* how far this rank is */
    const char *inputs[FPS_MAX_RANKS];
    char *outputs[FPS_MAX_RANKS];
} fps_collective;

static inline int64_t fps_exchange_bytes(int size, int depth, int64_t block_bytes) {
    return size * ((int64_t)sizeof(fps_rank) + depth * block_bytes);
}

static inline char *fps_block_of(const fps_exchange *x, int rank, uint64_t number) {
    return x->blocks + ((int64_t)rank * x->depth + (int64_t)(number % (uint64_t)x->depth)) * x->block_bytes;
}

/* A part of a block: where it begins in the tensor or in a part of it, and its length. */
typedef struct {
    int64_t offset, bytes;
} fps_span;

static inline int64_t fps_between(int64_t bytes, int64_t most) { return bytes < 0 ? 0 : bytes < most ? bytes : most; }

/* What block `number` carries of each part. */
static inline fps_span fps_span_of(const fps_collective *c, uint64_t number) {
    const int64_t offset = (int64_t)(number - c->first) * c->piece;
    return (fps_span){offset, fps_between(c->bytes - offset, c->piece)};
}

/* What rank `owner` reduces of a block of all-reduce, which is cut into as many parts as there are ranks. */
static inline fps_span fps_reduced_span(const fps_exchange *x, const fps_collective *c, uint64_t number, int owner) {
    const int64_t begin = (int64_t)(number - c->first) * c->piece * x->size;
    const int64_t bytes = fps_between(c->bytes - begin, c->piece * x->size);
    const int64_t lines = (bytes + FPS_LINE - 1) / FPS_LINE, each = (lines + x->size - 1) / x->size * FPS_LINE;
    return (fps_span){begin + owner * each, fps_between(bytes - owner * each, each)};
}

/* Whether rank `to` needs what rank `from` has. */
static inline int fps_gives(const fps_collective *c, int from, int to) {
    if (c->kind == FPS_BROADCAST || c->kind == FPS_SCATTER) return from == c->root;
    if (c->kind == FPS_REDUCE || c->kind == FPS_GATHER) return to == c->root;
    return 1;
}

/* Whether this rank compares its collective with that of rank `other`, although it needs nothing of it: the root does with all, and
 * all with the root. Once, at the first block, or ranks that differ in the root would not wait for each other. */
static inline int fps_compares(const fps_exchange *x, const fps_collective *c, uint64_t number, int other) {
    const int has_root = c->kind == FPS_BROADCAST || c->kind == FPS_SCATTER || c->kind == FPS_REDUCE || c->kind == FPS_GATHER;
    return has_root && number == c->first && (x->rank == c->root || other == c->root);
}

/* Which of a rank's inputs, and of the parts of its block, is for rank `to`: its own, or one for all. */
static inline int fps_part_for(const fps_collective *c, int to) {
    return c->kind == FPS_REDUCE_SCATTER || c->kind == FPS_ALL_TO_ALL || c->kind == FPS_SCATTER ? to : 0;
}

#define FPS_STRIDE 1024 /* bytes that are copied between two looks ahead */

/* Ask for memory that a later stage reads, so that it comes while this one works on what is in the cache. An address beyond the
 * tensor is asked for in vain, without harm. */
static inline void fps_ask_for(const char *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += FPS_LINE) __builtin_prefetch(from + i, 0, 2);
}

static inline void fps_copy(char *restrict to, const char *restrict from, int64_t bytes, const char *ahead) {
    for (int64_t i = 0; i < bytes; i += FPS_STRIDE) {
        const int64_t length = bytes - i < FPS_STRIDE ? bytes - i : FPS_STRIDE;
        fps_ask_for(ahead + i, length);
        memcpy(to + i, from + i, (size_t)length);
    }
}

/* Copy into a block. Past the caches where that is better: a line that another core has changed is slow to fetch where the cores share
 * no cache, and one that comes from memory is not. The publishing exchange comes after these stores, because of the fence. */
static void fps_put(const fps_exchange *x, char *to, const char *from, int64_t bytes) {
    int64_t i = 0;
#if defined(__x86_64__)
    if (x->streams) {
        for (; i + FPS_LINE <= bytes; i += FPS_LINE) {
            __builtin_prefetch(from + i + 2048, 0, 0);
            __m128i words[4];
            memcpy(words, from + i, FPS_LINE);
            for (int k = 0; k < 4; k++) _mm_stream_si128((__m128i *)(to + i) + k, words[k]);
        }
        _mm_sfence();
    }
#endif
    memcpy(to + i, from + i, (size_t)(bytes - i));
}

/* Copy what the others need of this rank's tensors. */
static void fps_block_write(const fps_exchange *x, const fps_collective *c, uint64_t number) {
    char *block = fps_block_of(x, x->rank, number);
    const fps_span span = fps_span_of(c, number);
    if (c->kind == FPS_ALL_REDUCE) {
        char *begin = block - fps_reduced_span(x, c, number, 0).offset;
        for (int j = 0; j < x->size; j++) {
            const fps_span part = fps_reduced_span(x, c, number, j);
            if (j != x->rank) fps_put(x, begin + part.offset, c->inputs[0] + part.offset, part.bytes);
        }
        return;
    }
    for (int j = 0, written = -1; j < x->size && span.bytes > 0; j++) { /* a barrier has no bytes */
        const int part = fps_part_for(c, j);
        if (j == x->rank || part == written || !fps_gives(c, x->rank, j)) continue;
        fps_put(x, block + part * c->piece, c->inputs[part] + span.offset, span.bytes);
        written = part;
    }
}

/* Reduce this rank's part of a block of all-reduce, into its block and its tensor. */
static void fps_block_reduce(const fps_exchange *x, const fps_collective *c, uint64_t number) {
    const char *parts[FPS_MAX_RANKS];
    const fps_span part = fps_reduced_span(x, c, number, x->rank);
    const int64_t place = part.offset - fps_reduced_span(x, c, number, 0).offset;
    for (int j = 0; j < x->size; j++)
        parts[j] = j == x->rank ? c->inputs[0] + part.offset : fps_block_of(x, j, number) + place;
    const int64_t ahead = (int64_t)(c->written - number) * c->piece * x->size, step = FPS_REDUCE_TILE * c->element_bytes;
    char *result = fps_block_of(x, x->rank, number) + place, *own = c->outputs[0] + part.offset;
    for (int64_t i = 0; i < part.bytes; i += step) {
        const int64_t bytes = part.bytes - i < step ? part.bytes - i : step;
        fps_ask_for(parts[x->rank] + ahead, bytes);
        c->reduce(own + i, x->streams ? NULL : result + i, parts, x->size, bytes / c->element_bytes);
        if (x->streams) fps_put(x, result + i, own + i, bytes);
        for (int j = 0; j < x->size; j++) parts[j] += bytes;
    }
}

/* Copy what the others have reduced of a block of all-reduce. */
static void fps_block_copy_reduced(const fps_exchange *x, const fps_collective *c, uint64_t number) {
    const int64_t begin = fps_reduced_span(x, c, number, 0).offset;
    const int64_t ahead = (int64_t)(c->written - number) * c->piece * x->size;
    for (int step = 1; step < x->size; step++) {
        const int j = (x->rank + step) % x->size;
        const fps_span part = fps_reduced_span(x, c, number, j);
        fps_copy(c->outputs[0] + part.offset, fps_block_of(x, j, number) + (part.offset - begin), part.bytes,
                 c->inputs[0] + part.offset + ahead);
    }
}

/* Copy what this rank needs of its own tensor and of the others' blocks, or reduce it. */
static void fps_block_read(const fps_exchange *x, const fps_collective *c, uint64_t number) {
    const char *parts[FPS_MAX_RANKS];
    const fps_span span = fps_span_of(c, number);
    const int part = fps_part_for(c, x->rank);
    const int has_one = c->kind == FPS_SCATTER || c->kind == FPS_BROADCAST; /* an output, and not one for each rank */
    if (span.bytes == 0) return; /* of a barrier */
    for (int j = 0; j < x->size; j++)
        if (!fps_gives(c, j, x->rank)) parts[j] = NULL;
        else parts[j] = j == x->rank ? c->inputs[part] + span.offset : fps_block_of(x, j, number) + part * c->piece;
    if (c->kind == FPS_ALL_REDUCE_SMALL || c->kind == FPS_REDUCE_SCATTER || (c->kind == FPS_REDUCE && x->rank == c->root))
        c->reduce(c->outputs[0] + span.offset, NULL, parts, x->size, span.bytes / c->element_bytes);
    else
        for (int step = 0; step < x->size; step++) {
            const int j = (x->rank + step) % x->size; /* its own part first: the input may be another rank's output, too */
            if (!parts[j]) continue;
            char *to = c->outputs[has_one ? 0 : j] + span.offset;
            if (to != parts[j]) memcpy(to, parts[j], (size_t)span.bytes);
        }
}

enum { FPS_STAGE_WRITE, FPS_STAGE_REDUCE, FPS_STAGE_READ };

/* Whether rank `other` lets this rank enter a stage of a block. -1: it is in another collective. */
static int fps_is_open(const fps_exchange *x, const fps_collective *c, int stage, uint64_t number, int other) {
    const fps_rank *rank = &x->ranks[other];
    if (other == x->rank) return 1;
    if (stage == FPS_STAGE_WRITE) return fps_block_load(&rank->read) + (uint64_t)x->depth > number;
    if (!fps_gives(c, other, x->rank) && !fps_compares(x, c, number, other)) return 1;
    if (fps_block_load(&rank->written) <= number) return 0;
    const fps_collective_words *words = &rank->words[number % (uint64_t)x->depth];
    if (words->what != c->words.what || words->bytes != c->words.bytes) return -1;
    return stage == FPS_STAGE_REDUCE || c->kind != FPS_ALL_REDUCE || fps_block_load(&rank->reduced) > number;
}

/* Whether all ranks let this rank enter: 1, 0 or -1; `other` is then the one that does not. */
static int fps_all_open(const fps_exchange *x, const fps_collective *c, int stage, uint64_t number, int *other) {
    for (int j = 0; j < x->size; j++) {
        const int open = fps_is_open(x, c, stage, number, j);
        if (open == 1) continue;
        *other = j;
        return open;
    }
    return 1;
}

/* The stage that this rank can enter next: FPS_STAGE_..., or -1 where it has to wait for `other`, or -2 where they differ.
 * Blocks are read first, while they are in the cache; then reduced, because others wait for it. */
static int fps_next_stage(const fps_exchange *x, const fps_collective *c, int *other) {
    const uint64_t reduced = c->kind == FPS_ALL_REDUCE ? c->reduced : c->written;
    int open = 0;
    if (c->read < reduced) {
        open = fps_all_open(x, c, FPS_STAGE_READ, c->read, other);
        if (open == 1) return FPS_STAGE_READ;
    }
    if (open == 0 && reduced < c->written) {
        open = fps_all_open(x, c, FPS_STAGE_REDUCE, c->reduced, other);
        if (open == 1) return FPS_STAGE_REDUCE;
    }
    if (open == 0 && c->written < c->end && c->written < c->read + (uint64_t)x->depth) {
        int writer = 0;
        if (fps_all_open(x, c, FPS_STAGE_WRITE, c->written, &writer) == 1) return FPS_STAGE_WRITE;
        if (c->read == reduced) *other = writer;
    }
    return open < 0 ? -2 : -1;
}

/* Publish a count, and wake the ranks that sleep. */
static void fps_publish(const fps_exchange *x, uint64_t *count, uint64_t value) {
    fps_block_publish(count, value);
    for (int j = 0; j < x->size; j++) {
        fps_rank *rank = &x->ranks[j];
        if (j == x->rank || !fps_sleeping_load(&rank->sleeping)) continue;
        fps_event_add(&rank->event);
        fps_event_wake(&rank->event);
    }
}

static void fps_enter(const fps_exchange *x, fps_collective *c, int stage) {
    fps_rank *own = &x->ranks[x->rank];
    if (stage == FPS_STAGE_WRITE) {
        own->words[c->written % (uint64_t)x->depth] = c->words;
        fps_block_write(x, c, c->written);
        fps_publish(x, &own->written, ++c->written);
    } else if (stage == FPS_STAGE_REDUCE) {
        fps_block_reduce(x, c, c->reduced);
        fps_publish(x, &own->reduced, ++c->reduced);
    } else {
        if (c->kind == FPS_ALL_REDUCE) fps_block_copy_reduced(x, c, c->read);
        else fps_block_read(x, c, c->read);
        fps_publish(x, &own->read, ++c->read);
    }
}

static inline int fps_has_failed_rank(const fps_exchange *x) {
    for (int j = 0; j < x->size; j++)
        if (fps_state_acquire(&x->ranks[j].state) == FPS_FAILED) return 1;
    return 0;
}

/* Go on with a collective until this rank has read all blocks below `end`, or until this rank has slept for a slice of time without an event. FPS_WAITING may
 * come earlier, if a rank has failed. `other`: the rank that this one waits for, or that is in another collective. */
static int fps_exchange_advance(const fps_exchange *x, fps_collective *c, uint64_t end, int64_t slice_ns, int *other) {
    fps_rank *own = &x->ranks[x->rank];
    int spins = x->spins;
    fps_yields yields = {x->yields, 0};
    while (c->read < end) {
        int stage = fps_next_stage(x, c, other);
        if (stage >= 0) {
            fps_enter(x, c, stage);
            spins = x->spins;
            yields = (fps_yields){x->yields, 0};
            continue;
        }
        if (stage == -2) return FPS_DIFFERS;
        if (spins > 0) {
            spins--;
            fps_pause();
            continue;
        }
        if (fps_yield_again(&yields)) continue;
        const uint32_t seen = fps_event_load(&own->event);
        fps_sleeping_set(&own->sleeping, 1);
        stage = fps_next_stage(x, c, other);
        const int has_failed = fps_has_failed_rank(x);
        if (stage == -1 && !has_failed) fps_event_sleep(&own->event, seen, slice_ns);
        fps_sleeping_set(&own->sleeping, 0);
        if (stage == -1 && (has_failed || fps_event_load(&own->event) == seen)) return FPS_WAITING;
        yields = (fps_yields){x->yields, 0};
    }
    return FPS_DONE;
}

/* Say to all ranks that this one has failed or left, and wake those that sleep. `message` ends with a zero byte. */
static void fps_exchange_end(const fps_exchange *x, uint32_t state, const char *message) {
    fps_rank *own = &x->ranks[x->rank];
    if (fps_state_acquire(&own->state) != FPS_LIVE) return;
    strncpy(own->message, message, FPS_MESSAGE_BYTES - 1);
    fps_state_change(&own->state, FPS_LIVE, state);
    for (int j = 0; j < x->size; j++) {
        if (j == x->rank) continue;
        fps_event_add(&x->ranks[j].event);
        fps_event_wake(&x->ranks[j].event);
    }
}

#endif
