/* Where one tile of a fold is read and written: the buffers themselves, or a stage in the cache that non-temporal stores then
 * copy to them. */
#ifndef FPS_FOLD_STAGING_H
#define FPS_FOLD_STAGING_H

#include <string.h>

#include "update/fold.h"
#include "update/fold_coefficients.h"
#include "update/fold_isa.h"
#include "base/failpoints.h"

/* A tile's weights, then its planes. */
typedef FPS_REAL fps_stage[(2 + FPS_MAX_USER_PLANES) * FPS_TILE] FPS_ON_LINE;

/* Streamed tiles are shorter, so that the stores of one overlap with the loads of the next. Single-pass tiles are longer,
 * because each tile has a fixed cost. */
static inline int64_t fps_tile_length(const fps_fold_job *job, int64_t first, int64_t last, int passes_once) {
    int64_t most = job->streaming ? FPS_STREAMED_TILE : passes_once ? FPS_LONG_TILE : FPS_TILE;
    return last - first < most ? last - first : most;
}

static inline int fps_begins_line(const FPS_REAL *address) {
    return (uintptr_t)address % (FPS_LINE_REALS * sizeof(FPS_REAL)) == 0;
}

/* Whether a rule's one loop can use non-temporal stores itself: nothing else writes the tile. */
static int fps_streams_itself(const fps_fold_job *job, const fps_coefficients *by, int64_t first) {
    int written = fps_writes(job->rule, by->flags);
    return job->streaming && fps_taken_at_once(job->rule) > 1 && written == (1 << job->state_planes) - 1
           && job->state_stride % FPS_LINE_REALS == 0 && fps_begins_line(job->weights_out + first)
           && (written == 0 || fps_begins_line(job->state_out + first));
}

/* A staged tile's planes are updated in place, so that a rule's inputs and outputs have one stride. */
static inline fps_place fps_begin_tile(const fps_fold_job *job, FPS_REAL *stage, int64_t first, int64_t length, int streams) {
    fps_place place = {job->weights_in + first, job->weights_out + first, job->state_in + first, job->state_out + first,
                       job->state_stride, job->state_stride, streams, job->halves_out ? stage : NULL};
    FPS_FAILPOINT();
    if (!job->streaming || streams) return place;
    for (int plane = 0; plane < job->state_planes; plane++)
        memcpy(stage + (1 + plane) * FPS_TILE, place.state + plane * place.stride, length * sizeof(FPS_REAL));
    place.weights_out = stage;
    place.state = place.state_out = stage + FPS_TILE;
    place.stride = place.out_stride = FPS_TILE;
    return place;
}

/* Let the next loop, the last on this tile, write its results from the stage with non-temporal stores. */
static inline void fps_leave_stage(const fps_fold_job *job, int64_t first, fps_place *place) {
    place->weights_out = job->weights_out + first;
    place->state_out = job->state_out + first;
    place->out_stride = job->state_stride;
    place->streaming = 1;
}

/* Write weights in the type that the model has. */
static inline void fps_narrow(const fps_tile_functions *tile, int type, uint16_t *halves, const FPS_REAL *weights,
                              int64_t length) {
    if (type == FPS_FLOAT16) tile->narrow_float16(halves, weights, length);
    else tile->narrow_bfloat16(halves, weights, length);
}

/* Write the tile's weights, which are in the cache, in half precision. */
static inline void fps_show_tile(const fps_tile_functions *tile, const fps_fold_job *job, int64_t first, int64_t length,
                                 const fps_place *place) {
    int64_t kept = place->streaming ? length - length % FPS_LINE_REALS : 0;
    FPS_FAILPOINT();
    fps_narrow(tile, job->shown_type, job->halves_out + first, place->kept, kept);
    fps_narrow(tile, job->shown_type, job->halves_out + first + kept, place->weights_out + kept, length - kept);
}

static inline void fps_end_tile(const fps_tile_functions *tile, const fps_fold_job *job, const FPS_REAL *stage, int64_t first,
                                int64_t length, const fps_place *place) {
    if (job->halves_out) fps_show_tile(tile, job, first, length, place);
    if (!job->streaming || place->streaming) return;
    FPS_FAILPOINT();
    tile->stream(job->weights_out + first, stage, length);
    for (int plane = 0; plane < job->state_planes; plane++)
        tile->stream(job->state_out + plane * job->state_stride + first, stage + (1 + plane) * FPS_TILE, length);
}

#endif
