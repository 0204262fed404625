/* Counter-based random numbers and the distributions' functions, the same bits on every machine.
 *
 * The numbers are SplitMix64's (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), indexed
 * by a counter: a draw is a function of key and counter, and no state is shared. libm's last bit differs between machines, so
 * logarithm and exponential are written here as additions, multiplications and divisions in a fixed order; the build has
 * -ffp-contract=off, so nothing is fused. The numbers are not fit for cryptography, nor correctly rounded. */

#ifndef FPS_RNG_H
#define FPS_RNG_H

#include <stdint.h>
#include <string.h>

#define FPS_GOLDEN 0x9E3779B97F4A7C15ULL

static inline uint64_t fps_mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
}

/* The next number of the sequence, whose state moves on. */
static inline uint64_t fps_next_word(uint64_t *state) { return fps_mix(*state += FPS_GOLDEN); }

/* The number `counter` (from 0) of the SplitMix64 sequence that starts at `key`. */
static inline uint64_t fps_word(uint64_t key, uint64_t counter) {
    return fps_mix(key + (counter + 1) * FPS_GOLDEN);
}

/* The key of one of a seed's streams. */
static inline uint64_t fps_stream(uint64_t seed, uint64_t stream) {
    return fps_word(fps_word(seed, 0), stream);
}

/* Uniform in the open interval (0, 1): 52 bits and a half. */
static inline double fps_uniform(uint64_t key, uint64_t counter) {
    return ((double)(fps_word(key, counter) >> 12) + 0.5) * 0x1p-52;
}

/* Natural logarithm of a positive, normal number: 2 atanh((m - 1) / (m + 1)) + e ln 2, with m in [sqrt(1/2), sqrt(2)). */
static inline double fps_log(double x) {
    uint64_t bits;
    double m, s, square, series = 0;
    int64_t exponent;
    memcpy(&bits, &x, sizeof(bits));
    exponent = (int64_t)(bits >> 52) - 1023;
    bits = (bits & 0x000FFFFFFFFFFFFFULL) | 0x3FF0000000000000ULL;
    memcpy(&m, &bits, sizeof(m));
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent++;
    }
    s = (m - 1.0) / (m + 1.0);
    square = s * s;
    for (int k = 23; k >= 3; k -= 2) series = (series + 1.0 / (double)k) * square;
    return (double)exponent * 0x1.62e42fefa3800p-1 + (2.0 * (s + s * series) + (double)exponent * 0x1.ef35793c76730p-45);
}

/* e^x for |x| <= 700, clamped beyond: compute times are cut long before. */
static inline double fps_exp(double x) {
    static const double over_factorial[14] = {1.0, 1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24,
                                              1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880,
                                              1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800.0};
    double scale, r, sum = 0;
    int64_t k;
    uint64_t bits;
    if (x > 700.0) x = 700.0;
    if (x < -700.0) x = -700.0;
    k = (int64_t)(x * 1.4426950408889634 + (x < 0 ? -0.5 : 0.5));
    r = (x - (double)k * 0x1.62e42fefa3800p-1) - (double)k * 0x1.ef35793c76730p-45;
    for (int i = 13; i >= 0; i--) sum = sum * r + over_factorial[i];
    bits = (uint64_t)(k + 1023) << 52;
    memcpy(&scale, &bits, sizeof(scale));
    return sum * scale;
}

/* The quantile of the standard normal distribution: Wichura, "Algorithm AS 241", Applied Statistics 37 (1988), PPND16. */
static inline double fps_normal(double p) {
    double q = p - 0.5, r, numerator, denominator, x;
    if (q <= 0.425 && q >= -0.425) {
        r = 0.180625 - q * q;
        numerator = (((((((2.5090809287301226727e+3 * r + 3.3430575583588128105e+4) * r + 6.7265770927008700853e+4) * r +
                         4.5921953931549871457e+4) * r + 1.3731693765509461125e+4) * r + 1.9715909503065514427e+3) * r +
                      1.3314166789178437745e+2) * r + 3.3871328727963666080e+0) * q;
        denominator = (((((((5.2264952788528545610e+3 * r + 2.8729085735721942674e+4) * r + 3.9307895800092710610e+4) * r +
                           2.1213794301586595867e+4) * r + 5.3941960214247511077e+3) * r + 6.8718700749205790830e+2) * r +
                        4.2313330701600911252e+1) * r + 1.0);
        return numerator / denominator;
    }
    r = __builtin_sqrt(-fps_log(q <= 0 ? p : 1.0 - p));
    if (r <= 5.0) {
        r -= 1.6;
        numerator = (((((((7.74545014278341407640e-4 * r + 2.27238449892691845833e-2) * r + 2.41780725177450611770e-1) * r +
                         1.27045825245236838258e+0) * r + 3.64784832476320460504e+0) * r + 5.76949722146069140550e+0) * r +
                      4.63033784615654529590e+0) * r + 1.42343711074968357734e+0);
        denominator = (((((((1.05075007164441684324e-9 * r + 5.47593808499534494600e-4) * r + 1.51986665636164571966e-2) * r +
                           1.48103976427480074590e-1) * r + 6.89767334985100004550e-1) * r + 1.67638483018380384940e+0) * r +
                        2.05319162663775882187e+0) * r + 1.0);
    } else {
        r -= 5.0;
        numerator = (((((((2.01033439929228813265e-7 * r + 2.71155556874348757815e-5) * r + 1.24266094738807843860e-3) * r +
                         2.65321895265761230930e-2) * r + 2.96560571828504891230e-1) * r + 1.78482653991729133580e+0) * r +
                      5.46378491116411436990e+0) * r + 6.65790464350110377720e+0);
        denominator = (((((((2.04426310338993978564e-15 * r + 1.42151175831644588870e-7) * r + 1.84631831751005468180e-5) * r +
                           7.86869131145613259100e-4) * r + 1.48753612908506148525e-2) * r + 1.36929880922735805310e-1) * r +
                        5.99832206555887937690e-1) * r + 1.0);
    }
    x = numerator / denominator;
    return q < 0 ? -x : x;
}

#endif
