/* The fold in double precision, for the file of floats: all places are in floats, of which a double is two. */
#ifndef FPS_FOLD_DOUBLE_H
#define FPS_FOLD_DOUBLE_H

#include <stdint.h>

#define FPS_HIDDEN __attribute__((visibility("hidden")))

/* As fps_fold_range with the loops of an instruction set, on an fps_fold_job of FPS_FLOAT64. `scratch` has room for twice the
 * bytes of that of floats. */
FPS_HIDDEN int fps_fold_doubles(int isa, const void *job, void *scratch, int64_t first, int64_t last);

/* As fps_largest_in. */
FPS_HIDDEN double fps_largest_of_doubles(int isa, const void *job, const void *push, int64_t first, int64_t last,
                                         int32_t *parameter);

#endif
