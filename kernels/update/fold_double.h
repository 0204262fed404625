/* The fold in double precision, for the file of floats: all places are in floats, of which a double is two. */
#ifndef FPS_FOLD_DOUBLE_H
#define FPS_FOLD_DOUBLE_H

#include <stddef.h>
#include <stdint.h>

#define FPS_HIDDEN __attribute__((visibility("hidden")))

/* As fps_fold_range with the loops of an instruction set, on an fps_fold_job of FPS_FLOAT64. `scratch` has room for
 * fps_doubles_scratch_bytes. */
FPS_HIDDEN int fps_fold_doubles(int isa, const void *job, void *scratch, int64_t first, int64_t last);

/* As fps_largest_in. */
FPS_HIDDEN double fps_largest_of_doubles(int isa, const void *job, const void *push, int64_t first, int64_t last,
                                         int32_t *parameter);

FPS_HIDDEN size_t fps_doubles_scratch_bytes(void);

#endif
