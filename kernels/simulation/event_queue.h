/* The event queue of a simulation: events ordered by time, and by sequence number at equal times.
 *
 * It is a 4-ary heap in one array, without pointers: half as deep as a binary heap, and a node's children share a cache line or
 * two. The order is total, so it is the same on every machine. */

#ifndef FPS_EVENT_QUEUE_H
#define FPS_EVENT_QUEUE_H

#include <stdint.h>
#include <stdlib.h>

typedef struct {
    int64_t key;       /* the time in ns, or another ordered value */
    uint64_t sequence; /* number of the push: orders equal keys */
    int32_t kind;
    int32_t index;
} fps_event;

typedef struct {
    fps_event *events;
    int64_t length;
    int64_t room;
    uint64_t made; /* events pushed so far */
} fps_queue;

static inline int fps_event_before(const fps_event *a, const fps_event *b) {
    return a->key < b->key || (a->key == b->key && a->sequence < b->sequence);
}

/* Add an event; return -1 when memory is exhausted. */
static inline int fps_queue_push(fps_queue *queue, int64_t key, int32_t kind, int32_t index) {
    fps_event event = {key, queue->made, kind, index};
    int64_t hole = queue->length;
    if (queue->length == queue->room) {
        int64_t room = queue->room ? 2 * queue->room : 16;
        fps_event *events = (fps_event *)realloc(queue->events, (size_t)room * sizeof(fps_event));
        if (!events) return -1;
        queue->events = events;
        queue->room = room;
    }
    queue->made++;
    queue->length++;
    while (hole > 0) {
        int64_t parent = (hole - 1) / 4;
        if (!fps_event_before(&event, &queue->events[parent])) break;
        queue->events[hole] = queue->events[parent];
        hole = parent;
    }
    queue->events[hole] = event;
    return 0;
}

/* Remove and return the first event. The queue must not be empty. */
static inline fps_event fps_queue_pop(fps_queue *queue) {
    fps_event first = queue->events[0], last;
    int64_t hole = 0, length = --queue->length;
    if (length == 0) return first;
    last = queue->events[length];
    for (;;) {
        int64_t child = 4 * hole + 1, end = child + 4 < length ? child + 4 : length, least = child;
        if (child >= length) break;
        for (child++; child < end; child++)
            if (fps_event_before(&queue->events[child], &queue->events[least])) least = child;
        if (!fps_event_before(&queue->events[least], &last)) break;
        queue->events[hole] = queue->events[least];
        hole = least;
    }
    queue->events[hole] = last;
    return first;
}

static inline void fps_queue_free(fps_queue *queue) {
    free(queue->events);
    queue->events = NULL;
    queue->length = queue->room = 0;
}

#endif
