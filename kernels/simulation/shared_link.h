/* A shared link: transfers in progress share its bandwidth evenly. It is one direction of a full-duplex cable.
 *
 * All transfers of a link have the same rate, min(most, bandwidth / n), so one number is enough: the bytes that each transfer
 * has been served since the link was last idle. A transfer ends when that number reaches its value at the transfer's start plus
 * the transfer's size (the virtual time of generalized processor sharing; Parekh and Gallager 1993). A start or an end costs
 * one heap operation, however many transfers share the link. */

#ifndef FPS_SHARED_LINK_H
#define FPS_SHARED_LINK_H

#include <string.h>

#include "simulation/event_queue.h"

typedef struct {
    double bandwidth;      /* bytes per ns of all transfers together; 0: unbounded */
    double most;           /* upper bound of one transfer in bytes per ns; 0: none */
    double served;         /* bytes that each transfer has been served since the link was idle */
    double carried;        /* bytes of transfers that ended */
    int64_t updated_ns;    /* time at which `served` holds */
    int64_t busy_ns;       /* time with a transfer in progress */
    int64_t scheduled_ns;  /* time of its pending event; -1: none */
    int64_t peak;          /* most transfers at once */
    fps_queue progress;    /* transfers by the value of `served` at which they end */
} fps_link;

/* Bytes per ns of each transfer in progress. At least one must be. */
static inline double fps_link_rate(const fps_link *link) {
    double share = link->bandwidth / (double)link->progress.length;
    return link->most > 0 && link->most < share ? link->most : share;
}

static inline void fps_link_advance(fps_link *link, int64_t now_ns) {
    if (link->progress.length) {
        link->served += fps_link_rate(link) * (double)(now_ns - link->updated_ns);
        link->busy_ns += now_ns - link->updated_ns;
    }
    link->updated_ns = now_ns;
}

/* Begin a transfer; return -1 when memory is exhausted. Positive doubles are ordered like the integers of their bits. */
static inline int fps_link_begin(fps_link *link, int64_t now_ns, double bytes, int32_t transfer) {
    double end;
    int64_t key;
    fps_link_advance(link, now_ns);
    if (!link->progress.length) link->served = 0;
    end = link->served + bytes;
    memcpy(&key, &end, sizeof(key));
    if (fps_queue_push(&link->progress, key, 0, transfer) < 0) return -1;
    if (link->progress.length > link->peak) link->peak = link->progress.length;
    return 0;
}

/* Bytes that the next transfer to end still needs. */
static inline double fps_link_left(const fps_link *link) {
    double end;
    memcpy(&end, &link->progress.events[0].key, sizeof(end));
    return end - link->served;
}

/* The time at which the next transfer ends unless another begins before, rounded up to a whole ns. */
static inline int64_t fps_link_next_ns(const fps_link *link) {
    double left_ns = fps_link_left(link) / fps_link_rate(link);
    int64_t whole_ns = (int64_t)left_ns;
    if (left_ns <= 0) return link->updated_ns;
    return link->updated_ns + whole_ns + ((double)whole_ns + 1e-3 < left_ns);
}

/* Remove a transfer that has ended by the link's time; return its number, or -1. Within 1/1000 ns counts as ended. */
static inline int32_t fps_link_ended(fps_link *link) {
    if (!link->progress.length || fps_link_left(link) > 1e-3 * fps_link_rate(link)) return -1;
    return fps_queue_pop(&link->progress).index;
}

#endif
