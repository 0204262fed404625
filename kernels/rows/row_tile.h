/* The rules' loops over rows of a table, compiled once for each instruction set: the includer defines FPS_ISA(name).
 *
 * A loop takes rows that are all different, each with its gradient, and writes them in place. It does what torch does to the
 * coalesced rows of a sparse gradient. */

/* torch.optim.SGD without momentum. */
static inline __attribute__((always_inline)) int32_t FPS_ISA(sgd_row)(const fps_coefficients *by, const fps_row *row,
                                                                      const int64_t width) {
    float *restrict weights = row->weights;
    const float *restrict gradient = row->gradient;
    const float scale = by->scale, minus_rate = by->minus_rate;
    int32_t most = 0;
    for (int64_t i = 0; i < width; i++) {
        weights[i] = weights[i] + minus_rate * (gradient[i] * scale);
        most = fps_larger(most, weights[i]);
    }
    return most;
}

/* torch.optim.Adagrad: pow, add, sqrt, add_, div, add_. State: the sum of squares. */
static inline __attribute__((always_inline)) int32_t FPS_ISA(adagrad_row)(const fps_coefficients *by, const fps_row *row,
                                                                          const int64_t width) {
    float *restrict weights = row->weights, *restrict sums = row->planes[0];
    const float *restrict gradient = row->gradient;
    const float scale = by->scale, minus_rate = by->minus_rate, epsilon = by->epsilon;
    int32_t most = 0;
    for (int64_t i = 0; i < width; i++) {
        float step = gradient[i] * scale;
        sums[i] = sums[i] + step * step;
        weights[i] = weights[i] + minus_rate * (step / (__builtin_sqrtf(sums[i]) + epsilon));
        most = fps_larger(fps_larger(most, weights[i]), sums[i]);
    }
    return most;
}

/* torch.optim.SparseAdam: sub, mul_, add_; pow, sub_, mul_, add_; sqrt_, add_, div_, mul, add_. State: the means of gradients
 * and squares. `undampened` is 1 - beta1. */
static inline __attribute__((always_inline)) int32_t FPS_ISA(sparse_adam_row)(const fps_coefficients *by, const fps_row *row,
                                                                              const int64_t width) {
    float *restrict weights = row->weights, *restrict means = row->planes[0], *restrict squares = row->planes[1];
    const float *restrict gradient = row->gradient;
    const float scale = by->scale, minus_rate = by->minus_rate, epsilon = by->epsilon;
    const float fraction1 = by->undampened, fraction2 = by->one_minus_beta2;
    int32_t most = 0;
    for (int64_t i = 0; i < width; i++) {
        float step = gradient[i] * scale;
        means[i] = means[i] + (step - means[i]) * fraction1;
        squares[i] = squares[i] + (step * step - squares[i]) * fraction2;
        weights[i] = weights[i] + minus_rate * (means[i] / (__builtin_sqrtf(squares[i]) + epsilon));
        most = fps_larger(fps_larger(most, weights[i]), squares[i]);
    }
    return most;
}

/* Adagrad with one accumulator a row: the sum of the means of the row's squares (as torchrec's row-wise Adagrad). */
static inline __attribute__((always_inline)) int32_t FPS_ISA(row_wise_adagrad_row)(const fps_coefficients *by, const fps_row *row,
                                                                                   const int64_t width) {
    float *restrict weights = row->weights;
    const float *restrict gradient = row->gradient;
    const float scale = by->scale;
    float total[8] = {0}, sum = 0, rate;
    int32_t most = 0;
    int64_t i = 0;
    /* Eight partial sums, in the same order on every instruction set. */
    for (; i + 8 <= width; i += 8)
        for (int j = 0; j < 8; j++) total[j] += (gradient[i + j] * scale) * (gradient[i + j] * scale);
    for (; i < width; i++) total[i & 7] += (gradient[i] * scale) * (gradient[i] * scale);
    for (int j = 0; j < 8; j++) sum += total[j];
    row->planes[0][0] = sum = row->planes[0][0] + sum / (float)width;
    rate = by->minus_rate / (__builtin_sqrtf(sum) + by->epsilon);
    for (i = 0; i < width; i++) {
        weights[i] = weights[i] + rate * (gradient[i] * scale);
        most = fps_larger(most, weights[i]);
    }
    return fps_larger(most, sum);
}

/* A rule's loop over rows, compiled also for the usual widths, as constants. Returns whether the results are finite. */
#define FPS_ROWS_OF_WIDTH(name, width)                                                                                   \
    for (int64_t r = 0; r < count; r++) {                                                                                \
        int32_t found = FPS_ISA(name##_row)(by, &rows[r], width);                                                        \
        most = found > most ? found : most;                                                                              \
    }                                                                                                                    \
    break;
#define FPS_ROW_LOOP(number, NAME, name, ...)                                                                            \
    static __attribute__((noinline)) int FPS_ISA(name##_rows)(const fps_coefficients *by, int64_t width,                 \
                                                              const fps_row *rows, int64_t count) {                      \
        int32_t most = 0;                                                                                                \
        switch (width) {                                                                                                 \
            case 16: FPS_ROWS_OF_WIDTH(name, 16)                                                                         \
            case 32: FPS_ROWS_OF_WIDTH(name, 32)                                                                         \
            case 64: FPS_ROWS_OF_WIDTH(name, 64)                                                                         \
            default: FPS_ROWS_OF_WIDTH(name, width)                                                                      \
        }                                                                                                                \
        return most < FPS_INFINITY_BITS;                                                                                 \
    }
FPS_ROW_RULES(FPS_ROW_LOOP)
#undef FPS_ROW_LOOP
#undef FPS_ROWS_OF_WIDTH

#define FPS_ROW_ENTRY(number, NAME, name, ...) [number] = FPS_ISA(name##_rows),
static const fps_row_loop FPS_ISA(row_loops)[FPS_N_ROW_RULES] = {FPS_ROW_RULES(FPS_ROW_ENTRY)};
#undef FPS_ROW_ENTRY
