/* The fold's driver: one pass over memory, segment by segment and tile by tile. One module includes it, once for each type of
 * numbers. Lengths and places are in numbers here; only those of a segment are in floats. */
#ifndef FPS_FOLD_RUN_H
#define FPS_FOLD_RUN_H

#include <string.h>

#include "update/fold.h"
#include "update/fold_coefficients.h"
#include "update/fold_isa.h"
#include "update/fold_staging.h"
#include "base/failpoints.h"

static inline int fps_rule_planes(const fps_fold_job *job) {
    return job->state_planes - (job->ema_plane >= 0);
}

/* Whether the rule is known and the state has the planes that this push writes. */
static inline int fps_is_possible(const fps_fold_job *job, const fps_push *push, int32_t group) {
    int needed = fps_planes_needed(job->rule, &push->hypers[group]);
    if (FPS_IS_USERS(job->rule) && (!job->user_rule || fps_rule_planes(job) > FPS_MAX_USER_PLANES)) return 0;
    return needed >= 0 && needed <= fps_rule_planes(job);
}

/* Move the average towards the weights just written. */
static void fps_average(const fps_tile_functions *tile, const fps_fold_job *job, int64_t length, const fps_place *place) {
    int64_t plane = job->ema_plane * place->stride;
    if (job->ema_plane >= 0)
        tile->average(fps_lerp_of(1 - job->ema_decay), length, place->weights_out, place->state + plane,
                      place->state_out + plane);
}

/* Copy the planes that this push does not write, such as the momentum buffer of a group without momentum. */
static void fps_carry_planes(const fps_fold_job *job, const fps_coefficients *by, int64_t length, const fps_place *place) {
    int written = fps_writes(job->rule, by->flags);
    for (int plane = 0; plane < fps_rule_planes(job); plane++)
        if (place->state != place->state_out && !(written >> plane & 1))
            memcpy(place->state_out + plane * place->stride, place->state + plane * place->stride, length * sizeof(FPS_REAL));
}

/* Call a user's rule; `hyper` is a copy that it may write to. */
static void fps_call_user(const fps_fold_job *job, const fps_coefficients *by, fps_hyper *hyper, int64_t length,
                          const FPS_REAL *gradient, const fps_place *place) {
    FPS_REAL scaled[FPS_TILE];
    if (by->scale != 1) {
        for (int64_t i = 0; i < length; i++) scaled[i] = gradient[i] * by->scale;
        gradient = scaled;
    }
    job->user_rule(length, by->steps, &hyper->learning_rate, gradient, place->weights, place->weights_out, place->state,
                   place->state_out, place->stride);
}

/* A push's gradient on one tile in full precision: in place, or widened into `room`. */
static inline const FPS_REAL *fps_gradient(const fps_tile_functions *tile, const fps_fold_job *job, const fps_push *push,
                                        int64_t first, int64_t length, FPS_REAL *room) {
    if (job->gradient_type == FPS_REAL_TYPE) return (const FPS_REAL *)push->gradient + first;
    if (job->gradient_type == FPS_FLOAT16) tile->widen_float16(room, (const uint16_t *)push->gradient + first, length);
    else tile->widen_bfloat16(room, (const uint16_t *)push->gradient + first, length);
    return room;
}

/* Whether a single pass of the rule's loop, which reads `at_once` gradients, takes all `count` of them: neither inputs nor
 * results are read again, so nothing has to stay in the cache. */
static inline int fps_passes_once(const fps_fold_job *job, int count, int at_once) {
    return count <= at_once && fps_taken_at_once(job->rule) > 1 && job->gradient_type == FPS_REAL_TYPE && job->ema_plane < 0
           && !job->halves_out;
}

/* Whether the results of a user's rule are finite; the rules' own loops check theirs. */
static int fps_is_finite(const fps_tile_functions *tile, const fps_fold_job *job, int64_t length, const fps_place *place) {
    if (!job->nonfinite) return 1;
    int finite = tile->is_finite(place->weights_out, length);
    for (int plane = 0; plane < fps_rule_planes(job); plane++)
        finite &= tile->is_finite(place->state_out + plane * place->stride, length);
    return finite;
}

/* Flag a fold with non-finite results: a gradient was non-finite, or it overflowed the rule. */
static inline void fps_flag(const fps_fold_job *job, int finite) {
    if (!finite && job->nonfinite) *job->nonfinite = 1;
}

/* Apply `count` pushes (at most fps_taken_at_once) to one tile: their sum, or with `each` one after the other. The next
 * application on the tile reads their results. */
static void fps_apply(const fps_tile_functions *tile, const fps_fold_job *job, const fps_coefficients *by, int64_t length,
                      const FPS_REAL *const *gradients, int count, int each, fps_place *place) {
    int finite;
    FPS_FAILPOINT();
    if (FPS_IS_USERS(job->rule)) {
        fps_hyper hyper = by->hyper;
        fps_call_user(job, by, &hyper, length, gradients[0], place);
        finite = fps_is_finite(tile, job, length, place);
    } else
        finite = tile->rules[job->rule][place->streaming](by, length, gradients, count, each, place);
    fps_flag(job, finite);
    fps_carry_planes(job, by, length, place);
    fps_average(tile, job, length, place);
    place->weights = place->weights_out;
    place->state = place->state_out;
}

/* Copy a parameter without a gradient, and move its average if anything was pushed. */
static void fps_carry(const fps_tile_functions *tile, const fps_fold_job *job, int64_t length, fps_place *place) {
    memcpy(place->weights_out, place->weights, length * sizeof(FPS_REAL));
    int planes = job->n_pushes ? fps_rule_planes(job) : job->state_planes;
    for (int plane = 0; plane < planes && place->state != place->state_out; plane++)
        memcpy(place->state_out + plane * place->stride, place->state + plane * place->stride, length * sizeof(FPS_REAL));
    if (job->n_pushes) fps_average(tile, job, length, place);
    place->weights = place->weights_out;
    place->state = place->state_out;
}

static void fps_carry_range(const fps_tile_functions *tile, const fps_fold_job *job, int64_t first, int64_t last) {
    fps_stage stage;
    for (int64_t length; first < last; first += length) {
        length = fps_tile_length(job, first, last, 0);
        fps_place place = fps_begin_tile(job, stage, first, length, 0);
        fps_carry(tile, job, length, &place);
        fps_end_tile(tile, job, stage, first, length, &place);
    }
}

/* The coefficients of a sum of pushes: shared by all parameters of a group with equal steps and a gradient in every push. */
typedef struct {
    fps_coefficients by;
    int same_scale, is_of_all;
    int32_t group;
    int64_t steps;
} fps_sum;

static fps_sum fps_sum_of(const fps_fold_job *job, const fps_segment *segment, const fps_push *pushes, int count) {
    fps_sum sum = {.same_scale = 1, .is_of_all = count == job->n_pushes, .group = segment->group};
    sum.steps = job->steps_in[segment->parameter];
    for (int push = 1; push < count; push++) sum.same_scale &= pushes[push].scale == pushes[0].scale;
    double rate = fps_mean_rate(pushes, count, segment->group) * job->rate_scale;
    double scale = job->scale * (sum.same_scale ? pushes[0].scale : 1);
    sum.by = fps_coefficients_of(job->rule, &pushes[0].hypers[segment->group], rate, scale, sum.steps);
    return sum;
}

static inline int fps_sum_fits(const fps_sum *sum, const fps_fold_job *job, const fps_segment *segment, int count) {
    return sum->is_of_all && count == job->n_pushes && sum->group == segment->group
           && sum->steps == job->steps_in[segment->parameter];
}

/* Add up the pushes' gradients on one tile, in order. */
static void fps_add_up(const fps_tile_functions *tile, const fps_fold_job *job, int same_scale, const fps_push *pushes,
                       int count, int64_t first, int64_t length, FPS_REAL *total) {
    FPS_REAL room[FPS_TILE] FPS_ON_LINE;
    if (same_scale && job->gradient_type == FPS_REAL_TYPE) tile->sum(total, pushes, count, first, length);
    else
        for (int push = 0; push < count; push++) {
            const FPS_REAL *gradient = fps_gradient(tile, job, &pushes[push], first, length, room);
            tile->add(total, gradient, same_scale ? 1 : (FPS_REAL)pushes[push].scale, push == 0, length);
        }
}

static void fps_fold_sum(const fps_tile_functions *tile, const fps_fold_job *job, const fps_sum *sum, const fps_push *pushes,
                         int count, int64_t first, int64_t last) {
    FPS_REAL room[FPS_SUMMED_AT_ONCE][FPS_TILE] FPS_ON_LINE, total[FPS_TILE] FPS_ON_LINE;
    fps_stage stage;
    int in_loop = sum->same_scale && count <= fps_taken_at_once(job->rule);
    int streams = fps_streams_itself(job, &sum->by, first);
    int passes_once = in_loop && fps_passes_once(job, count, fps_taken_at_once(job->rule));
    for (int64_t length; first < last; first += length) {
        /* More gradients are summed in the cache, by whole tiles also where results are streamed: shorter ones end before the
         * processor fetches ahead. */
        if (in_loop) length = fps_tile_length(job, first, last, passes_once);
        else length = last - first < FPS_TILE ? last - first : FPS_TILE;
        const FPS_REAL *gradients[FPS_SUMMED_AT_ONCE] = {total};
        fps_place place = fps_begin_tile(job, stage, first, length, streams);
        if (!in_loop) fps_add_up(tile, job, sum->same_scale, pushes, count, first, length, total);
        for (int push = 0; in_loop && push < count; push++)
            gradients[push] = fps_gradient(tile, job, &pushes[push], first, length, room[push]);
        fps_apply(tile, job, &sum->by, length, gradients, in_loop ? count : 1, 0, &place);
        fps_end_tile(tile, job, stage, first, length, &place);
    }
}

/* Apply push by push and move the average after each; `by` has each push's coefficients. The first push reads the published
 * buffers, the others update the tile that it wrote. A push without a gradient for this parameter only moves the average. */
static void fps_fold_each_averaged(const fps_tile_functions *tile, const fps_fold_job *job, const fps_segment *segment,
                                   const fps_coefficients *by, int64_t first, int64_t last) {
    FPS_REAL room[FPS_TILE] FPS_ON_LINE;
    fps_stage stage;
    const fps_push *pushes = job->pushes;
    for (int64_t length; first < last; first += length) {
        length = fps_tile_length(job, first, last, 0);
        fps_place place = fps_begin_tile(job, stage, first, length, 0);
        for (int push = 0, applied = 0; push < job->n_pushes; push++)
            if (fps_is_present(&pushes[push], segment->parameter)) {
                const FPS_REAL *gradient = fps_gradient(tile, job, &pushes[push], first, length, room);
                fps_apply(tile, job, &by[applied++], length, &gradient, 1, 0, &place);
            } else if (place.weights != place.weights_out) fps_carry(tile, job, length, &place);
            else fps_average(tile, job, length, &place);
        fps_end_tile(tile, job, stage, first, length, &place);
    }
}

/* Number of leading pushes that one loop can apply while the element is in registers: those with coefficients of one kind. */
static int fps_applied_at_once(int rule, const fps_coefficients *by, int count) {
    int most = count < fps_taken_at_once(rule) ? count : fps_taken_at_once(rule), at_once = 1;
    while (at_once < most && by[at_once].flags == by[0].flags && by[at_once].lerp.fraction == by[0].lerp.fraction
           && by[at_once].lerp.is_small == by[0].lerp.is_small)
        at_once++;
    return at_once;
}

/* Apply `count` pushes one after the other, all with a gradient for the parameter, without an average. */
static void fps_fold_each(const fps_tile_functions *tile, const fps_fold_job *job, const fps_push *pushes, int count,
                          const fps_coefficients *by, int64_t first, int64_t last) {
    FPS_REAL room[FPS_SUMMED_AT_ONCE][FPS_TILE] FPS_ON_LINE;
    fps_stage stage;
    int passes_once = fps_passes_once(job, count, fps_applied_at_once(job->rule, by, count));
    for (int64_t length; first < last; first += length) {
        length = fps_tile_length(job, first, last, passes_once);
        int at_once = fps_applied_at_once(job->rule, by, count), streams = fps_streams_itself(job, &by[count - 1], first);
        fps_place place = fps_begin_tile(job, stage, first, length, streams && at_once == count);
        for (int push = 0; push < count; push += at_once) {
            const FPS_REAL *gradients[FPS_SUMMED_AT_ONCE];
            at_once = fps_applied_at_once(job->rule, by + push, count - push);
            if (streams && push + at_once == count) fps_leave_stage(job, first, &place);
            for (int each = 0; each < at_once; each++)
                gradients[each] = fps_gradient(tile, job, &pushes[push + each], first, length, room[each]);
            fps_apply(tile, job, by + push, length, gradients, at_once, 1, &place);
        }
        fps_end_tile(tile, job, stage, first, length, &place);
    }
}

/* One tile of a whole parameter: read from the published buffers, or `again` from those that this fold has written. */
static inline fps_place fps_place_of(const fps_fold_job *job, int64_t first, int again) {
    fps_place place = {(again ? job->weights_out : job->weights_in) + first, job->weights_out + first,
                       (again ? job->state_out : job->state_in) + first, job->state_out + first, job->state_stride,
                       job->state_stride, 0};
    return place;
}

/* Apply a rule that sums over the whole parameter [first, last): one pass for the sums, and one for the results. Both cut the
 * parameter into the same tiles, so the sums have the same bits in every process. `count` pushes are one sum. */
static void fps_apply_whole(const fps_tile_functions *tile, const fps_fold_job *job, const fps_coefficients *given,
                            const fps_push *pushes, int count, int same_scale, int again, int64_t first, int64_t last) {
    FPS_REAL room[FPS_TILE] FPS_ON_LINE;
    fps_coefficients by = *given;
    int finite = 1;
    memset(by.hyper.sums, 0, sizeof(by.hyper.sums));
    for (int writes = 0; writes < 2; writes++)
        for (int64_t from = first, length; from < last; from += length) {
            length = last - from < FPS_TILE ? last - from : FPS_TILE;
            fps_place place = fps_place_of(job, from, again);
            const FPS_REAL *gradient = room;
            if (count == 1) gradient = fps_gradient(tile, job, pushes, from, length, room);
            else fps_add_up(tile, job, same_scale, pushes, count, from, length, room);
            if (writes) fps_apply(tile, job, &by, length, &gradient, 1, 0, &place);
            else {
                place.weights_out = place.state_out = NULL;
                fps_call_user(job, &by, &by.hyper, length, gradient, &place);
            }
        }
    for (int sum = 0; sum < FPS_MAX_SUMS; sum++) finite &= isfinite(by.hyper.sums[sum]) != 0;
    fps_flag(job, finite);
}

/* Write the halves of a parameter that such a rule has updated. */
static void fps_show_whole(const fps_tile_functions *tile, const fps_fold_job *job, int64_t first, int64_t last) {
    FPS_FAILPOINT();
    fps_narrow(tile, job->shown_type, job->halves_out + first, job->weights_out + first, last - first);
}

/* Apply such a rule push by push, and move the average after each. */
static void fps_fold_each_whole(const fps_tile_functions *tile, const fps_fold_job *job, const fps_segment *segment,
                                const fps_coefficients *by, int64_t first, int64_t last) {
    int again = 0, applied = 0;
    for (int push = 0; push < job->n_pushes; push++) {
        if (fps_is_present(&job->pushes[push], segment->parameter))
            fps_apply_whole(tile, job, &by[applied++], &job->pushes[push], 1, 1, again, first, last);
        else if (job->ema_plane < 0) continue;
        else
            for (int64_t from = first, length; from < last; from += length) {
                length = last - from < FPS_TILE ? last - from : FPS_TILE;
                fps_place place = fps_place_of(job, from, again);
                if (again) fps_average(tile, job, length, &place);
                else fps_carry(tile, job, length, &place);
            }
        again = 1;
    }
}

/* The largest absolute value of a push's gradient within [first, last), and its parameter; infinite if a value is non-finite.
 * It costs a pass over one gradient, for the rare fold with non-finite results. */
static FPS_REAL fps_largest_in(const fps_tile_functions *tile, const fps_fold_job *job, const fps_push *push, int64_t first,
                            int64_t last, int32_t *parameter) {
    FPS_REAL room[FPS_TILE] FPS_ON_LINE, most = -1;
    for (int64_t s = 0; s < job->n_segments; s++) {
        const fps_segment *segment = &job->segments[s];
        int64_t from = fps_segment_first(segment), end = from + fps_segment_length(segment);
        if (from < first || from >= last || !fps_is_present(push, segment->parameter)) continue;
        for (int64_t length; from < end; from += length) {
            length = end - from < FPS_TILE ? end - from : FPS_TILE;
            const FPS_REAL *gradient = fps_gradient(tile, job, push, from, length, room);
            for (int64_t i = 0; i < length; i++) {
                FPS_REAL size = FPS_MAGNITUDE(gradient[i] * (FPS_REAL)push->scale);
                if (!(size > most) && size <= most) continue;
                *parameter = segment->parameter;
                if (!(size < INFINITY)) return INFINITY;
                most = size;
            }
        }
    }
    return most;
}

static inline void fps_write_steps(const fps_fold_job *job, const fps_segment *segment, int count) {
    FPS_FAILPOINT();
    job->steps_out[segment->parameter] =
        job->steps_in[segment->parameter] + (job->mode == FPS_FOLD_EACH ? count : count > 0);
}

/* Whether the next segment is adjacent to this one, for which every push has a gradient, and gets the same coefficients. */
static inline int fps_goes_on(const fps_fold_job *job, const fps_segment *segment) {
    const fps_segment *next = segment + 1;
    if (job->rule == FPS_RULE_SUMMING || next == job->segments + job->n_segments) return 0;
    if (next->offset != segment->offset + segment->length) return 0;
    if (next->group != segment->group || job->steps_in[next->parameter] != job->steps_in[segment->parameter]) return 0;
    for (int push = 0; push < job->n_pushes; push++)
        if (!fps_is_present(&job->pushes[push], next->parameter)) return 0;
    return 1;
}

/* Whether the job has types that this file folds. A user's rule is compiled for floats. */
static inline int fps_has_types(const fps_fold_job *job) {
    if (FPS_REAL_TYPE == FPS_FLOAT64) return job->gradient_type == FPS_FLOAT64 && !job->halves_out && !FPS_IS_USERS(job->rule);
    if (job->gradient_type < FPS_FLOAT32 || job->gradient_type > FPS_BFLOAT16) return 0;
    return !job->halves_out || job->shown_type == FPS_FLOAT16 || job->shown_type == FPS_BFLOAT16;
}

/* Fold the numbers [first, last) of the job: several processes may share one fold by ranges. The call whose range has a
 * parameter's first float writes its steps. Adjacent segments with the same coefficients are folded as one, because starting a
 * segment costs more than folding a short one. Returns 0 or a negative FPS_FOLD_ status. */
static int fps_fold_range(const fps_tile_functions *tile, const fps_fold_job *job, fps_fold_scratch *scratch, int64_t first,
                          int64_t last) {
    fps_push *present = scratch->present;
    fps_coefficients *by = scratch->by;
    fps_sum sum = {.is_of_all = 0};
    if (job->n_pushes > FPS_MAX_PUSHES) return FPS_FOLD_TOO_MANY;
    if (!fps_has_types(job)) return FPS_FOLD_UNKNOWN_TYPE;
    if (job->ema_plane != -1 && job->ema_plane != job->state_planes - 1) return FPS_FOLD_UNKNOWN_RULE;
    for (int64_t s = 0; s < job->n_segments; s++) {
        const fps_segment *segment = &job->segments[s];
        int64_t begin = fps_segment_first(segment), end = begin + fps_segment_length(segment);
        int64_t from = begin > first ? begin : first, to = end < last ? end : last;
        int begins_here = begin >= first && begin < last, count = 0;
        if (from >= to && !begins_here) continue;
        if (job->rule == FPS_RULE_SUMMING && to - from != end - begin) return FPS_FOLD_PART;
        for (int push = 0; push < job->n_pushes; push++)
            if (fps_is_present(&job->pushes[push], segment->parameter)) {
                if (!fps_is_possible(job, &job->pushes[push], segment->group)) return FPS_FOLD_UNKNOWN_RULE;
                present[count++] = job->pushes[push];
            }
        if (begins_here) fps_write_steps(job, segment, count);
        if (from >= to) continue;
        for (; count > 0 && count == job->n_pushes && to < last && fps_goes_on(job, &job->segments[s]); s++) {
            const fps_segment *next = &job->segments[s + 1];
            fps_write_steps(job, next, count);
            end = fps_segment_first(next) + fps_segment_length(next);
            to = end < last ? end : last;
        }
        if (job->mode == FPS_FOLD_EACH && (count || (job->ema_plane >= 0 && job->n_pushes))) {
            for (int push = 0; push < count; push++)
                by[push] = fps_coefficients_of(job->rule, &present[push].hypers[segment->group],
                                               fps_rate(&present[push], segment->group), present[push].scale,
                                               job->steps_in[segment->parameter] + push);
            if (job->rule == FPS_RULE_SUMMING) fps_fold_each_whole(tile, job, segment, by, from, to);
            else if (job->ema_plane >= 0) fps_fold_each_averaged(tile, job, segment, by, from, to);
            else fps_fold_each(tile, job, present, count, by, from, to);
        } else if (count == 0) fps_carry_range(tile, job, from, to);
        else {
            if (!fps_sum_fits(&sum, job, segment, count)) sum = fps_sum_of(job, segment, present, count);
            if (job->rule == FPS_RULE_SUMMING)
                fps_apply_whole(tile, job, &sum.by, present, count, sum.same_scale, 0, from, to);
            else fps_fold_sum(tile, job, &sum, present, count, from, to);
        }
        if (job->rule == FPS_RULE_SUMMING && job->halves_out) fps_show_whole(tile, job, from, to);
    }
    if (job->streaming) FPS_DRAIN(); /* a release store does not order non-temporal stores before it */
    return 0;
}

#endif
