/* The fold in double precision: the fold's own headers, compiled with doubles. A caller's job has places in floats. */
#define FPS_DOUBLE
#define FPS_FAILPOINTS_ELSEWHERE
#include "update/fold_run.h"
#include "update/fold_double.h"

int fps_fold_doubles(int isa, const void *job, void *scratch, int64_t first, int64_t last) {
    fps_fold_job own = *(const fps_fold_job *)job;
    own.state_stride /= FPS_REAL_FLOATS;
    return fps_fold_range(fps_isa_functions(isa), &own, scratch, first / FPS_REAL_FLOATS, last / FPS_REAL_FLOATS);
}

double fps_largest_of_doubles(int isa, const void *job, const void *push, int64_t first, int64_t last, int32_t *parameter) {
    return fps_largest_in(fps_isa_functions(isa), job, push, first / FPS_REAL_FLOATS, last / FPS_REAL_FLOATS, parameter);
}
