/* A link whose bandwidth is shared evenly by the transfers in progress on it, one direction of a full-duplex cable.
 *
 * All transfers of a link have the same rate, min(most, bandwidth / n), so that it is enough to keep how many bytes each of them
 * has been served since the link was last idle: a transfer ends when that number reaches what it was at its beginning plus its
 * size (the virtual time of generalized processor sharing; Parekh and Gallager 1993). A beginning or an end costs a heap's step,
 * however many share the link. What it refuses to know: latency, who transfers, and what. */

#ifndef FPS_LINKS_H
#define FPS_LINKS_H

#include <string.h>

#include "simulation/event_queue.h"

typedef struct {
    double bandwidth;      /* bytes per ns that all share; 0: without bound */
    double most;           /* bytes per ns of one transfer at most; 0: no such bound */
    double served;         /* bytes that each transfer has been served since the link was idle */
    double carried;        /* bytes of transfers that ended */
    int64_t updated_ns;    /* when `served` was true */
    int64_t busy_ns;       /* time with a transfer in progress */
    int64_t scheduled_ns;  /* the time of its event in the simulation's queue; -1: none */
    int64_t peak;          /* most transfers at once */
    fps_queue progress;    /* transfers by the `served` at which they end */
} fps_link;

/* Bytes per ns of each transfer in progress, of which there is one at least. */
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

/* A transfer begins; -1 when there is no memory. Positive doubles are ordered as the integers of their bits. */
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

/* When the next transfer ends if none begins before: rounded up to a whole ns. */
static inline int64_t fps_link_next_ns(const fps_link *link) {
    double left_ns = fps_link_left(link) / fps_link_rate(link);
    int64_t whole_ns = (int64_t)left_ns;
    if (left_ns <= 0) return link->updated_ns;
    return link->updated_ns + whole_ns + ((double)whole_ns + 1e-3 < left_ns);
}

/* Take a transfer that has ended by the link's time out: its number, or -1. Within 1/1000 ns counts as ended. */
static inline int32_t fps_link_ended(fps_link *link) {
    if (!link->progress.length || fps_link_left(link) > 1e-3 * fps_link_rate(link)) return -1;
    return fps_queue_pop(&link->progress).index;
}

#endif
