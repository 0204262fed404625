/* The arena's words: what every attached process agrees on, byte for byte.
 *
 * All offsets are in bytes from the arena's start. Words that another process writes at
 * the same time have a cache line of their own, grouped by writer. */
#ifndef FPS_ARENA_H
#define FPS_ARENA_H

#include <stddef.h>
#include <stdint.h>

#include "rows/rows.h"

#define FPS_MAGIC 0x6670732d6172656eULL /* "fps-aren" */
#define FPS_ABI 20
#define FPS_LINE 64
#define FPS_MAX_LANES 1024     /* lane + 1 must fit the lock word's 16 bits; scratch arrays are this long */
#define FPS_MAX_BUFFERS 127    /* a buffer's index must fit the commit word's 7 bits */
#define FPS_MAX_BATCH 64       /* pushes that one commit may fold */
#define FPS_MAX_SHARDS 64
#define FPS_STATE_BUFFERS 3    /* of rule state: the published one, the one that is written, and one that is copied */
#define FPS_WORKSPACES 2       /* of a shard: the one that combiners use, and one for a combiner that stopped, or a spare */
#define FPS_RECORDS (2 * FPS_WORKSPACES) /* two a workspace */
#define FPS_MESSAGE_BYTES 448
#define FPS_GAP_BUCKETS 512      /* of a histogram of times: 8 an octave, see fps_time_bucket */
#define FPS_STALENESS_BUCKETS 256 /* one a version; the last has all staler ones */
_Static_assert(FPS_MAX_LANES + 2 <= 0xffff, "lane + 1, the server's lane included, fits 16 bits of the lock and reader words");
_Static_assert(FPS_MAX_BUFFERS <= 0x7f, "a buffer fits 7 bits of the commit word, and buffer + 1 fits 8 of the reader word");
_Static_assert(FPS_MAX_SHARDS < 0x7f, "shard + 1 fits 7 bits of a lane's helping word");

/* Kinds of descriptor. */
#define FPS_PUSH 0  /* a gradient in a slot */
#define FPS_NULL 1  /* a step without a gradient (a skipped step under loss scaling): it counts, and changes nothing */
#define FPS_LEAVE 2 /* the worker leaves in good order; its lane's last descriptor */

/* What became of a push in a shard. */
#define FPS_OUTCOME_FOLDED 0
#define FPS_OUTCOME_DROPPED 1 /* it came too late: counted, and left out */
#define FPS_OUTCOME_REJECTED 2 /* not finite, or its result was not: its version has no more of it than of a null push */

/* States of a lane. */
#define FPS_LANE_FREE 0
#define FPS_LANE_LIVE 1
#define FPS_LANE_LEFT 2
#define FPS_LANE_FAILED 3 /* ended by an error that it had time to write into its message */
#define FPS_LANE_LEAVING 4 /* posted LEAVE and pushes no more, but still combines: its death matters */
#define FPS_LANE_DEAD 5    /* its process is proved to have ended: each shard's combiner retires it */
#define FPS_LANE_JOINING 6 /* has a new owner, which may push once each shard's combiner has let it join */
#define FPS_LANE_SERVING 7 /* the server's lane: it combines and never pushes */
#define FPS_LANE_EXPELLED 8 /* its words are damaged: nothing that it posted and that is not decided is read any more */

/* What is damaged in a lane that is expelled. */
#define FPS_DAMAGED_RING 1 /* descriptors posted that the ring cannot hold, or fewer than there were */
#define FPS_DAMAGED_KIND 2
#define FPS_DAMAGED_SLOT 3
#define FPS_DAMAGED_TURN 4 /* a push whose step was not granted */

/* A lane's state word: (generation : 24 | state : 8). A generation is one owner; what is said of an earlier one fails. */
static inline uint32_t fps_member_pack(uint32_t generation, uint32_t state) { return (generation << 8) | state; }
static inline uint32_t fps_member_state(uint32_t member) { return member & 0xff; }
static inline uint32_t fps_member_generation(uint32_t member) { return member >> 8; }
/* The low byte of a lane's helping word: a fold in that workspace of that shard. */
static inline uint32_t fps_help_of(uint32_t shard, uint64_t workspace) { return (uint32_t)(workspace << 7) | (shard + 1); }

/* Why a lane is expelled: (generation : 24 | FPS_DAMAGED_ : 8 | what was found : 32). */
static inline uint64_t fps_damage_pack(uint64_t generation, uint64_t what, uint64_t found) {
    return (generation << 40) | (what << 32) | (uint32_t)found;
}

/* What a worker announces of weights that its script has written: (posts : 16 | digest : 48). The posts tell for which push. */
#define FPS_DIGEST_BITS 48
static inline int64_t fps_written_pack(uint64_t posts, uint64_t digest) {
    return (int64_t)((posts << FPS_DIGEST_BITS) | (digest & ((1ULL << FPS_DIGEST_BITS) - 1)));
}

/* (posts : 48 | parts : 16). The posts tell for which push. */
#define FPS_EARLY_BITS 16
static inline uint64_t fps_early_pack(uint64_t posts, uint64_t parts) {
    return (posts << FPS_EARLY_BITS) | (parts & ((1ULL << FPS_EARLY_BITS) - 1));
}

/* One push as posted: exactly one cache line. */
typedef struct {
    uint64_t step;         /* which step of its worker this is, from 0 */
    uint64_t read_version; /* its timestamp: the oldest version of any shard that came for its step */
    int64_t post_ns;       /* when it was posted, on the clock that all workers share */
    double scale;          /* multiplies the gradient: 1, or 1 / the loss scale */
    double loss;           /* the worker's last loss, for observers; NaN if never told */
    uint32_t slot;         /* which of the lane's slots holds the gradient */
    uint32_t kind;         /* FPS_PUSH, FPS_NULL or FPS_LEAVE */
    uint32_t samples;      /* batch size, 0 if never told */
    uint32_t weight;       /* the gradients that this one is a sum of, which a mean counts; 0 is 1 */
    uint32_t reserved[2];
} fps_descriptor;
_Static_assert(sizeof(fps_descriptor) == FPS_LINE, "a descriptor is one cache line, so posting it dirties one");

/* A lane's control words. Its ring of descriptors follows, then its words in each shard, then a ring of outcomes a shard. */
typedef struct {
    uint64_t tail;  /* [TAIL] line of the producer: descriptors posted so far */
    uint64_t early; /* [EARLY] fps_early_pack: on one node of several, the parts of the next push that are in its slot */
    uint8_t pad_tail[48];
    /* Line of the combiners. */
    uint32_t event; /* [EVENT] futex word: moves whenever one of the lane's heads or grants does */
    uint8_t pad_event[60];
    /* Line of the worker. */
    uint32_t sleeping; /* paired with [EVENT] */
    uint32_t helping;  /* [HELP] (generation : 24 | workspace : 1 | shard + 1 : 7) whose fold this lane helps with, or 0 */
    uint8_t pad_sleeping[56];
    /* Membership. */
    uint32_t state; /* [STATE] fps_member_pack */
    uint32_t pad_member;
    int64_t process_id; /* for messages only: death is told by a pidfd, never by this number */
    int64_t first_core, cores; /* those that its worker may run on: their lowest number, and how many; a hint for speed */
    int64_t begins; /* descriptors below were posted by owners that were expelled; written before state becomes JOINING */
    int64_t miscounted; /* the `begins` that was written because the count of posts was damaged: nobody knows where these end */
    int64_t damage; /* fps_damage_pack; written before state becomes EXPELLED */
    uint8_t pad_state[8];
    /* Counters of the worker, for observers. */
    int64_t steps, wait_ns, compute_ns, loss_bits, samples, stale_blocks, push_ns;
    int64_t written; /* fps_written_pack: the weights that the next push is computed with, where its script wrote them */
    char message[FPS_MESSAGE_BYTES]; /* why it failed, or the job that it goes on in; written before state is FAILED or LEFT */
} fps_lane;
_Static_assert(sizeof(fps_lane) == 5 * FPS_LINE + FPS_MESSAGE_BYTES, "each writer's words stay on lines of their own");
_Static_assert(sizeof(fps_lane) % FPS_LINE == 0, "the ring behind it starts on a line");

/* A lane's words in one shard. */
typedef struct {
    /* Line of the shard's combiner. All of it is derived from committed state, so the next combiner can write it again. */
    uint64_t head;   /* [HEAD] descriptors that this shard is done with */
    int64_t granted; /* [GRANT] (generation : 24 | steps : 40) that the lane's owner may have begun, as far as this shard goes */
    int64_t batch;   /* the batch that goes with the grant; 0: the worker's own choice */
    int64_t folded, dropped, staleness_sum, staleness_max;
    int64_t reserved;
    /* Line of the worker. */
    uint64_t pin;   /* [PIN] buffer being read + 1, or 0 */
    uint64_t ready; /* [PIN] buffer that was fetched in the background, and is to be read next + 1, or 0 */
    uint64_t next;  /* [PIN] buffer being fetched in the background + 1, or 0 */
    uint8_t pad_pin[40];
    /* Line of the combiner, for observers: pushes that were rejected as non-finite, and the last of them; rows. */
    int64_t rejected, rejected_step, rejected_parameter;
    int64_t rows; /* of tables, in the lane's folded pushes */
    uint8_t pad_rejected[32];
} fps_lane_shard;
_Static_assert(sizeof(fps_lane_shard) == 3 * FPS_LINE, "combiner and worker write lines of their own");

/* The words of all readers: processes of the job's user that only read weights. One line, because combiners read `ready` and
 * `wanted` at each commit, and nobody writes it unless a reader comes or sleeps. */
typedef struct {
    uint64_t ready;  /* [READERS] falls only under all shard locks; the pins and the buffers of readers beyond do not count */
    uint64_t wanted; /* [WANTED] the least version that a reader sleeps for, or 0; of one that was killed until it is reached */
    uint32_t event;  /* [EVENT] futex word of all readers that sleep */
    uint32_t pad_event;
    int64_t stop; /* 1 once a reader asks the training to stop */
    uint8_t pad_readers[32];
} fps_readers;
/* A reader's word in one shard. The process that has the reader's socket name owns it. */
typedef struct {
    uint64_t pin; /* [PIN] buffer being read + 1, or 0 */
    uint8_t pad_pin[56];
} fps_reader_shard;
_Static_assert(sizeof(fps_readers) == FPS_LINE && sizeof(fps_reader_shard) == FPS_LINE, "each reader writes lines of its own");

/* What became of one push in one shard, for a job that is recorded. The combiner writes it before the commit that publishes it; a
 * combiner that recovers a dead one's lock decides and writes it again. So it holds for every push that the lane's head in the
 * shard has passed. The lane's worker reads it then, and posts into the same place of its ring only afterwards. */
typedef struct {
    uint64_t position; /* of the descriptor in its lane, from 1; any other number: this push was not recorded */
    uint64_t version;  /* folded, rejected: the version that it is part of; dropped: the version that it came too late for */
    int64_t decided_ns;
    int32_t staleness; /* of a folded or rejected push */
    uint32_t kind;     /* FPS_OUTCOME_* */
} fps_push_outcome;
_Static_assert(sizeof(fps_push_outcome) == FPS_LINE / 2, "two outcomes are a line");

/* A grant's word. One number, because it must never go back: a later owner may begin at a lower step, but has a higher
 * generation. */
static inline int64_t fps_granted_pack(int64_t generation, int64_t steps) {
    return (int64_t)(((uint64_t)generation << 40) | ((uint64_t)steps & 0xffffffffffULL));
}
static inline int64_t fps_granted_steps(int64_t granted) { return granted & 0xffffffffffLL; }
static inline int64_t fps_granted_generation(int64_t granted) { return (int64_t)((uint64_t)granted >> 40); }

/* What one commit publishes beside the weights. There are two in each workspace; the commit word says which one holds. */
typedef struct {
    uint64_t version;
    uint32_t weights_buffer, state_buffer;
    uint8_t pad[48];
} fps_record;

/* The words of a shard: one flip of its commit word publishes everything of it. */
typedef struct {
    uint64_t lock; /* [LOCK] (epoch : 13 | by hand : 1 | left workspace : 1, left lane + 1 : 16 | generation : 16 | lane + 1 : 16 |
                    * pending : 1) */
    uint8_t pad_lock[56];
    uint64_t commit; /* [COMMIT] (version : 40 | epoch : 15 | weights buffer : 7 | record : 2) */
    uint8_t pad_commit[56];
    fps_record records[FPS_RECORDS];
    int64_t due_ns; /* the deadline of the next timer, or -1; a hint for sleepers, the scheduler's state decides */
    int64_t last_update_ns; /* for the histogram of gaps */
    uint8_t pad_due[48];
    int64_t first, last; /* its floats of every buffer: [first, last). Never changes. */
    int64_t recorded;    /* whether push outcomes are recorded; set before the first push that is */
    int64_t rejections;  /* of all lanes, for observers */
    uint8_t pad_range[32];
    /* [PIN] the one reader that copies a whole version: (generation : 24 | lane + 1 : 16 | state buffer + 1 : 8 |
     * weights buffer + 1 : 8), or 0. */
    uint64_t reader;
    uint8_t pad_reader[56];
    uint64_t drawn; /* of shard 0: samples that all workers have drawn from their shared order */
    uint8_t pad_drawn[56];
    fps_undo undo; /* the log of its tables' rows */
} fps_shard_header;
_Static_assert(sizeof(fps_shard_header) == 11 * FPS_LINE, "lock, commit and the records are each on a line of their own");

/* One push of a fold, by its place: a lane's slot. */
typedef struct {
    uint32_t lane, slot, samples, weight;
    uint64_t step;
    double scale, rate_scale; /* as of fps_push in fold.h */
} fps_folded_push;

#define FPS_MAX_CHUNKS 56

/* The work item of a shard's workspace: the combiner writes it, helpers take chunks of it. Addresses differ between processes, so
 * everything is named by its number. */
typedef struct {
    uint64_t ticket; /* [WORK] (chunks : 8 | one bit a chunk that is not claimed : 56); exhausted when no bit is left */
    uint8_t pad_ticket[56];
    uint64_t done; /* [CHUNK] one bit a chunk */
    uint8_t pad_done[56];
    /* Written by the combiner before the ticket, and not again while a lane helps. */
    int64_t chunk_floats;
    double scale, rate_scale;
    int32_t mode, streaming;
    uint32_t weights_in, weights_out, state_in, n_pushes, state_out, pad_state_out;
    uint64_t pad_item[1];
    fps_folded_push pushes[]; /* FPS_MAX_PUSHES of fold.h */
} fps_work;
_Static_assert(sizeof(fps_work) == 3 * FPS_LINE, "claims, completions and the item have a line each");

/* The ticket of so many chunks, of which `left` are unclaimed. Equal tickets of two folds are harmless: a lane announces a claim
 * before it reads the ticket, and no fold is issued while any lane announces one. */
static inline uint64_t fps_ticket_pack(uint64_t chunks, uint64_t left) { return (chunks << FPS_MAX_CHUNKS) | left; }
static inline uint64_t fps_ticket_chunks(uint64_t ticket) { return ticket >> FPS_MAX_CHUNKS; }
static inline uint64_t fps_ticket_left(uint64_t ticket) { return ticket & ((1ULL << FPS_MAX_CHUNKS) - 1); }
/* The chunks of one of `parts` parts of a fold, one bit each. */
static inline uint64_t fps_chunks_of(uint64_t chunks, uint64_t part, uint64_t parts) {
    return (1ULL << (chunks * (part + 1) / parts)) - (1ULL << (chunks * part / parts));
}
/* The chunk to claim when some are left: the first of the lane's own part, or else the last of all, so that a lane that is done
 * early helps where the other lane arrives last. */
static inline uint64_t fps_ticket_choose(uint64_t ticket, uint64_t own) {
    uint64_t left = fps_ticket_left(ticket);
    return left & own ? __builtin_ctzll(left & own) : 63 - __builtin_clzll(left);
}

/* What may be seen of a shard: counters that the combiner adds to while it decides. Exact but for a combiner's death. */
typedef struct {
    int64_t gaps[FPS_GAP_BUCKETS]; /* time between two consecutive updates */
    int64_t staleness[FPS_STALENESS_BUCKETS];
    int64_t updates;               /* versions */
    int64_t average_staleness_sum; /* sum over the updates of <sigma> (Rudra, equation 2), in thousandths */
    int64_t rows_written;          /* of tables: a row that several pushes of a version have counts once */
    int64_t arrivals[][FPS_GAP_BUCKETS]; /* one a lane: when the k-th push of a version came, counted from its beginning */
} fps_statistics;

/* The bucket of a time in ns: 0 for 0, else 8 buckets an octave. */
static inline int fps_time_bucket(int64_t ns) {
    int octave;
    if (ns <= 0) return 0;
    octave = 63 - __builtin_clzll((uint64_t)ns);
    return octave < 3 ? (int)ns : (octave - 2) * 8 + (int)((ns >> (octave - 3)) & 7);
}
/* The least time of a bucket, in ns. */
static inline int64_t fps_bucket_time(int bucket) {
    return bucket < 8 ? bucket : (int64_t)(8 + (bucket & 7)) << (bucket / 8 - 1);
}

/* Written by the creator before anyone attaches, and never again. Type, name, and what it is. */
#define FPS_HEADER_WORDS(WORD)                                                                                           \
    WORD(uint64_t, magic) WORD(uint32_t, abi)                                                                            \
    WORD(uint32_t, n_lanes) WORD(uint32_t, n_buffers)                                                                    \
    WORD(uint32_t, n_slots) /* gradient slots of a lane */                                                               \
    WORD(uint32_t, ring_size) /* descriptors of a lane's ring; a power of two */                                         \
    WORD(uint32_t, n_groups) /* param_groups */                                                                          \
    WORD(uint32_t, n_parameters)                                                                                         \
    WORD(uint32_t, presence_words) /* 64-bit words of a push's presence bitmap */                                        \
    WORD(uint32_t, rule) /* FPS_RULE_* of fold.h */                                                                      \
    WORD(uint32_t, state_planes) /* buffers' worth of floats that the rule keeps, the weights' moving average too */     \
    WORD(uint32_t, n_shards)                                                                                             \
    WORD(uint32_t, checks_finite) /* whether a push that makes results infinite or NaN is rejected */                    \
    WORD(uint32_t, gradient_type) /* of fold.h: what lies in the slots; FPS_FLOAT64: every number is a double */         \
    WORD(uint32_t, shown_type) /* FPS_FLOAT32, or the half in which each weights buffer has the weights once more */     \
    WORD(uint32_t, n_readers) /* the most processes that only read weights, each with a buffer more */                   \
    WORD(uint32_t, n_tables)                                                                                             \
    WORD(uint32_t, row_rule) /* FPS_ROWS_* of rows.h, if there are tables */                                             \
    WORD(uint32_t, n_servers) /* 1: behind the n_lanes workers' lanes lies one of the job's server process, without slots */ \
    WORD(double, ema_decay) /* of the moving average of the weights, which is the last plane; 0: there is none */        \
    WORD(uint64_t, buffer_floats) /* floats of a weights buffer, parameters padded to whole lines */                     \
    WORD(uint64_t, carried_bytes) /* what a version carries besides: a line of marks, and values of any type; 0: nothing */ \
    WORD(uint64_t, shard_headers_offset) /* fps_shard_header[n_shards] */                                                \
    WORD(uint64_t, statistics_offset) WORD(uint64_t, statistics_bytes) /* n_shards of them */                            \
    WORD(uint64_t, work_offset) WORD(uint64_t, work_bytes) /* shard-major, one a workspace */                            \
    WORD(uint64_t, segments_offset) /* fps_segment[n_parameters] */                                                      \
    WORD(uint64_t, tables_offset) /* fps_table[n_tables] */                                                              \
    WORD(uint64_t, lanes_offset) WORD(uint64_t, lane_bytes) WORD(uint64_t, lane_shards_offset)                           \
    WORD(uint64_t, reader_words_offset) /* fps_readers, then fps_reader_shard[n_readers][n_shards] */                    \
    WORD(uint64_t, push_outcomes_offset) /* within a lane */                                                             \
    WORD(uint64_t, scheduler_offset) WORD(uint64_t, scheduler_bytes) /* shard-major, one copy a record */                \
    WORD(uint64_t, rows_offset) /* the tables' rows: weights and state, one copy */                                      \
    WORD(uint64_t, rows_bytes)                                                                                           \
    WORD(uint64_t, weights_offset)                                                                                       \
    WORD(uint64_t, weights_bytes) /* n_buffers: the floats, with a shown type the halves, and what a version carries */  \
    WORD(uint64_t, weights_carried_offset) /* within a weights buffer */                                                 \
    WORD(uint64_t, state_offset)                                                                                         \
    WORD(uint64_t, state_bytes) /* FPS_STATE_BUFFERS of them: int64 steps[n_parameters], then the planes */              \
    WORD(uint64_t, state_steps_bytes)                                                                                    \
    WORD(uint64_t, slots_offset) WORD(uint64_t, slot_bytes) /* lane-major */                                             \
    WORD(uint64_t, slot_presence_offset) WORD(uint64_t, slot_versions_offset)                                            \
    WORD(uint64_t, slot_nonfinite_offset) /* a bit for each parameter that a device found non-finite, before the post */ \
    WORD(uint64_t, slot_gradient_offset)                                                                                 \
    WORD(uint64_t, slot_carried_offset) /* what a push brings for its version to carry */                                \
    WORD(uint64_t, extra_offset)                                                                                         \
    WORD(uint64_t, extra_bytes) /* model buffers (BatchNorm): one slot a lane */                                         \
    WORD(uint64_t, reader_weights_offset) /* n_readers weights buffers; without pages until a reader has the place */    \
    /* Weights and rule state once more: in use while a combiner that stopped may still write others. Without pages until then. */ \
    WORD(uint64_t, spare_weights_offset) WORD(uint64_t, spare_state_offset)                                              \
    WORD(uint64_t, undo_offset) /* shard-major; without pages until a push reserves them, as the rest of the arena */    \
    WORD(uint64_t, undo_bytes)                                                                                           \
    WORD(uint64_t, row_slots_offset) /* lane-major: the rows in each slot */                                             \
    WORD(uint64_t, row_slot_bytes) WORD(uint64_t, total_bytes)

typedef struct {
#define FPS_HEADER_WORD(type, name) type name;
    FPS_HEADER_WORDS(FPS_HEADER_WORD)
#undef FPS_HEADER_WORD
} fps_header;
_Static_assert(sizeof(fps_header) <= 4096, "the header lies before the first shard_header");

/* -- the two packed words ---------------------------------------------------------------------------------------------- */
#define FPS_PENDING 1ULL
#define FPS_LEFT (0x1ffffULL << 33)
#define FPS_BY_HAND (1ULL << 50) /* its owner writes buffers by hand, for as long as it likes: nobody takes the lock over */
static inline uint64_t fps_lock_pack(uint64_t epoch, uint64_t generation, uint64_t owner) {
    return (epoch << 51) | ((generation & 0xffff) << 17) | (owner << 1);
}
static inline uint64_t fps_lock_owner(uint64_t lock) { return (lock >> 1) & 0xffff; } /* lane + 1, or 0: free */
static inline uint64_t fps_lock_generation(uint64_t lock) { return (lock >> 17) & 0xffff; } /* of that lane, its low bits */
static inline uint64_t fps_lock_epoch(uint64_t lock) { return lock >> 51; }
/* The lane that may still write in the workspace that it left behind when it stopped, and that workspace. */
static inline uint64_t fps_left_pack(uint64_t lane, uint64_t workspace) { return (workspace << 49) | ((lane + 1) << 33); }
static inline uint64_t fps_lock_left(uint64_t lock) { return (lock >> 33) & 0xffff; } /* lane + 1, or 0: none */
static inline uint64_t fps_lock_left_workspace(uint64_t lock) { return (lock >> 49) & 1; }
/* What stays the same while an owner holds the lock: others set PENDING, and the lane that left a workspace clears LEFT. */
static inline uint64_t fps_lock_own(uint64_t lock) { return lock & ~(FPS_PENDING | FPS_LEFT | FPS_BY_HAND); }
/* The word of the lock once its owner has released it. */
static inline uint64_t fps_lock_free(uint64_t lock) { return lock & (FPS_LEFT | (0x1fffULL << 51)); }

static inline uint64_t fps_commit_pack(uint64_t version, uint64_t epoch, uint64_t buffer, uint64_t record) {
    return (version << 24) | ((epoch & 0x7fff) << 9) | (buffer << 2) | record;
}
static inline uint64_t fps_commit_version(uint64_t commit) { return commit >> 24; }
static inline uint64_t fps_commit_epoch(uint64_t commit) { return (commit >> 9) & 0x7fff; }
static inline uint64_t fps_commit_buffer(uint64_t commit) { return (commit >> 2) & 0x7f; }
static inline uint64_t fps_commit_record(uint64_t commit) { return commit & 3; }
/* A workspace has records 2w and 2w + 1. */
static inline uint64_t fps_commit_workspace(uint64_t commit) { return (commit >> 1) & 1; }

static inline uint64_t fps_reader_pack(uint64_t generation, uint64_t lane, uint64_t state, uint64_t weights) {
    return (generation << 32) | ((lane + 1) << 16) | ((state + 1) << 8) | (weights + 1);
}
static inline uint64_t fps_reader_weights(uint64_t reader) { return reader & 0xff; } /* + 1; 0: none */
static inline uint64_t fps_reader_state(uint64_t reader) { return (reader >> 8) & 0xff; } /* + 1; 0: none */
static inline uint64_t fps_reader_owner(uint64_t reader) { return reader >> 16; } /* (generation : 24 | lane + 1 : 16) */
#endif
