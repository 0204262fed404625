/* Simulation records: the optional trace of events, and lists of pushes that wait to be folded.
 *
 * Both are growable arrays without pointers. */

#ifndef FPS_RECORDS_H
#define FPS_RECORDS_H

#include <stdint.h>
#include <stdlib.h>

/* One record of the trace: 32 bytes, with the fields of the trace's NumPy dtype in its order. */
typedef struct {
    int64_t time_ns;
    int64_t version;
    int64_t detail;
    int32_t worker;
    int16_t shard;
    int16_t kind;
} fps_event_record;

typedef struct {
    fps_event_record *records;
    int64_t length;
    int64_t room;
} fps_trace;

/* Add a record; return -1 when memory is exhausted. */
static inline int fps_trace_add(fps_trace *trace, fps_event_record record) {
    if (trace->length == trace->room) {
        int64_t room = trace->room ? 2 * trace->room : 1024;
        fps_event_record *records = (fps_event_record *)realloc(trace->records, (size_t)room * sizeof(fps_event_record));
        if (!records) return -1;
        trace->records = records;
        trace->room = room;
    }
    trace->records[trace->length++] = record;
    return 0;
}

/* A received push that waits for its fold; `next` is the next of its list, or the next free entry. */
typedef struct {
    int64_t read_version;
    int32_t worker;
    int32_t next;
} fps_kept;

typedef struct {
    int32_t first, last;
} fps_kept_list;

typedef struct {
    fps_kept *kept;
    int32_t room;
    int32_t first_free;
} fps_kept_pool;

/* Append a push to a list; return -1 when memory is exhausted. */
static inline int fps_kept_add(fps_kept_pool *pool, fps_kept_list *list, int32_t worker, int64_t read_version) {
    int32_t index = pool->first_free;
    if (index < 0) {
        int32_t room = pool->room ? 2 * pool->room : 64;
        fps_kept *kept = (fps_kept *)realloc(pool->kept, (size_t)room * sizeof(fps_kept));
        if (!kept) return -1;
        pool->kept = kept;
        for (int32_t i = pool->room; i < room; i++) kept[i].next = i + 1 < room ? i + 1 : -1;
        index = pool->room;
        pool->room = room;
    }
    pool->first_free = pool->kept[index].next;
    pool->kept[index].worker = worker;
    pool->kept[index].read_version = read_version;
    pool->kept[index].next = -1;
    if (list->last >= 0)
        pool->kept[list->last].next = index;
    else
        list->first = index;
    list->last = index;
    return 0;
}

/* Append all of `from` to `onto` and empty `from`. */
static inline void fps_kept_move(fps_kept_pool *pool, fps_kept_list *onto, fps_kept_list *from) {
    if (from->first < 0) return;
    if (onto->last >= 0)
        pool->kept[onto->last].next = from->first;
    else
        onto->first = from->first;
    onto->last = from->last;
    from->first = from->last = -1;
}

/* Free a whole list. */
static inline void fps_kept_clear(fps_kept_pool *pool, fps_kept_list *list) {
    if (list->first < 0) return;
    pool->kept[list->last].next = pool->first_free;
    pool->first_free = list->first;
    list->first = list->last = -1;
}

#endif
