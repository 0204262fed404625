/* What the folds of dense parameters and of rows share: what a rule does in one push for one parameter (its coefficients, its
 * variant, and the state planes that it uses), the pushes' rates, and the check of results. */
#ifndef FPS_FOLD_COEFFICIENTS_H
#define FPS_FOLD_COEFFICIENTS_H

#include <math.h>
#include <string.h>

#include "update/fold.h"

static inline fps_lerp fps_lerp_of(double fraction) {
    fps_lerp by = {(FPS_REAL)fraction, fabs((FPS_REAL)fraction) < 0.5};
    if (!by.is_small) by.fraction -= 1;
    return by;
}

static inline void fps_correct_nothing(fps_coefficients *by, const fps_hyper *hyper, double learning_rate, double steps) {
    (void)by, (void)hyper, (void)learning_rate, (void)steps;
}

/* Adamax's and Adam's corrections for means that began at 0. */
static void fps_correct_adamax(fps_coefficients *by, const fps_hyper *hyper, double learning_rate, double steps) {
    by->lerp = fps_lerp_of(1 - hyper->beta1);
    by->minus_rate = (FPS_REAL)-(learning_rate / (1 - pow(hyper->beta1, steps + 1)));
}

static void fps_correct_adam(fps_coefficients *by, const fps_hyper *hyper, double learning_rate, double steps) {
    fps_correct_adamax(by, hyper, learning_rate, steps);
    by->root_correction2 = (FPS_REAL)sqrt(1 - pow(hyper->beta2, steps + 1));
    by->inverse_root_correction2 = 1 / by->root_correction2;
}

static void fps_correct_adagrad(fps_coefficients *by, const fps_hyper *hyper, double learning_rate, double steps) {
    by->minus_rate = (FPS_REAL)-(learning_rate / (1 + steps * hyper->learning_rate_decay));
}

/* NAdam's momentum in step `step`, from 1. */
static inline double fps_momentum_of(double beta1, double decay, double step) {
    return beta1 * (1.0 - 0.5 * pow(0.96, step * decay));
}

/* NAdam's product of the momenta of the first `steps` steps. Torch multiplies it in the precision of its default type, not of
 * the parameter's.
 *
 * It is computed and not stored: as state it would be one float for each parameter, beside planes of one for each weight. The
 * momenta are below 1 and never fall, so a product that one of them leaves as it is stays so: the loop ends after about
 * 100 / (1 - beta1) steps, or 750 / (1 - beta1) in double precision. A thread keeps its last products, so that the next step is
 * one multiplication. */
static double fps_mu_product(double beta1, double decay, double steps, int is_double) {
    enum { KEPT = 8 };
    static __thread struct {
        double beta1, decay, steps, product;
        int is_double;
    } kept[KEPT];
    static __thread unsigned next;
    int best = -1;
    for (int index = 0; index < KEPT; index++)
        if (kept[index].steps > 0 && kept[index].steps <= steps && kept[index].beta1 == beta1 && kept[index].decay == decay
            && kept[index].is_double == is_double && (best < 0 || kept[index].steps > kept[best].steps))
            best = index;
    double step = best < 0 ? 0 : kept[best].steps;
    double product = best < 0 ? 1 : kept[best].product;
    while (step < steps) {
        double momentum = fps_momentum_of(beta1, decay, ++step);
        double longer = is_double ? product * momentum : (float)product * (float)momentum;
        if (!(longer < product)) step = steps;
        product = longer;
    }
    if (best < 0) best = (int)(next++ % KEPT);
    kept[best].beta1 = beta1, kept[best].decay = decay, kept[best].steps = steps, kept[best].product = product;
    kept[best].is_double = is_double;
    return product;
}

static void fps_correct_nadam(fps_coefficients *by, const fps_hyper *hyper, double learning_rate, double steps) {
    double decay = hyper->learning_rate_decay, momentum = fps_momentum_of(hyper->beta1, decay, steps + 1);
    double following = fps_momentum_of(hyper->beta1, decay, steps + 2);
    double product = fps_mu_product(hyper->beta1, decay, steps + 1, (hyper->flags & FPS_HYPER_DOUBLE_PRODUCT) != 0);
    by->lerp = fps_lerp_of(1 - hyper->beta1);
    by->correction = (FPS_REAL)(1 - pow(hyper->beta2, steps + 1));
    by->gradient_rate = (FPS_REAL)(-learning_rate * (1 - momentum) / (1 - product));
    by->minus_rate = (FPS_REAL)(-learning_rate * following / (1 - product * following));
}

/* The length of the approximated simple moving average after `steps` steps: rho_t of RAdam's paper. */
static inline double fps_rho(double beta2, double steps) {
    double power = pow(beta2, steps);
    return 2 / (1 - beta2) - 1 - 2 * steps * power / (1 - power);
}

static void fps_correct_radam(fps_coefficients *by, const fps_hyper *hyper, double learning_rate, double steps) {
    double rho = fps_rho(hyper->beta2, steps + 1), most = 2 / (1 - hyper->beta2) - 1;
    (void)learning_rate;
    by->lerp = fps_lerp_of(1 - hyper->beta1);
    by->correction = (FPS_REAL)(1 - pow(hyper->beta1, steps + 1));
    by->root_correction2 = (FPS_REAL)sqrt(1 - pow(hyper->beta2, steps + 1));
    if (by->flags & FPS_BY_RECTIFIED)
        by->rectification = (FPS_REAL)sqrt((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho));
}

/* The rows' names, and the most state planes of each. */
typedef struct {
    int number, planes;
    const char *name;
} fps_rule_name;
#define FPS_RULE_NAME(number, NAME, name, planes, ...) {number, planes, #name},
static const fps_rule_name fps_rule_names[] = {FPS_UPDATE_RULES(FPS_RULE_NAME)};
#undef FPS_RULE_NAME
enum { FPS_RULE_NAMES = sizeof(fps_rule_names) / sizeof(fps_rule_names[0]) };

/* All flags of a rule's variants. */
static inline int fps_kinds(int rule) {
#define FPS_OR(rule, flags) | (flags)
#define FPS_KINDS(number, NAME, ...) \
    case number: return 0 FPS_##NAME##_VARIANTS(FPS_OR, number);
    switch (rule) { FPS_UPDATE_RULES(FPS_KINDS) }
#undef FPS_KINDS
#undef FPS_OR
    return 0;
}

/* The planes that a variant writes, one bit each; all for a number that no row has, as a user's rule's. */
static inline int fps_writes(int rule, int flags) {
#define FPS_WRITES(number, NAME, name, planes, at_once, writes, ...) \
    case number: return writes;
    switch (rule) { FPS_UPDATE_RULES(FPS_WRITES) }
#undef FPS_WRITES
    return ~0;
}

/* Number of gradients that the rule's loop takes at once. */
static inline int fps_taken_at_once(int rule) {
#define FPS_TAKEN(number, NAME, name, planes, at_once, ...) \
    case number: return FPS_AT_ONCE(at_once);
    switch (rule) { FPS_UPDATE_RULES(FPS_TAKEN) }
#undef FPS_TAKEN
    return 1;
}

/* The variant that a push with these hyper-parameters needs after `steps` applications. */
static inline int fps_flags_of(int rule, const fps_hyper *hyper, int64_t steps) {
    int flags = 0, kinds = fps_kinds(rule);
    int is_decoupled = hyper->flags & FPS_HYPER_DECOUPLED && kinds & FPS_BY_SHRINK;
    if (hyper->weight_decay != 0) flags |= is_decoupled ? FPS_BY_SHRINK : FPS_BY_DECAY;
    if (hyper->momentum != 0) {
        flags |= FPS_BY_MOMENTUM | (steps == 0 ? FPS_BY_FIRST : 0);
        if (hyper->flags & FPS_HYPER_NESTEROV) flags |= FPS_BY_NESTEROV;
    }
    if (hyper->flags & FPS_HYPER_CENTERED) flags |= FPS_BY_CENTERED;
    if (hyper->flags & FPS_HYPER_AMSGRAD) flags |= FPS_BY_AMSGRAD;
    if (kinds & FPS_BY_RECTIFIED && fps_rho(hyper->beta2, (double)steps + 1) > 5) flags |= FPS_BY_RECTIFIED;
    return flags & kinds;
}

/* Number of planes that a push with these hyper-parameters uses, or -1 for an unknown rule. The last plane that it writes
 * counts, and all before: RMSprop's mean of gradients is the third plane also without a momentum buffer, the second. */
static inline int fps_planes_needed(int rule, const fps_hyper *hyper) {
    if (FPS_IS_USERS(rule)) return 0;
    int written = fps_writes(rule, fps_flags_of(rule, hyper, 1));
    if (written == ~0) return -1;
    return written ? 32 - __builtin_clz((unsigned)written) : 0;
}

/* Hyper-parameters are doubles, as in Python; torch rounds each to the parameter's type where its kernel begins, and so does
 * this function. */
static fps_coefficients fps_coefficients_of(int rule, const fps_hyper *hyper, double learning_rate, double scale,
                                            int64_t steps) {
    fps_coefficients by;
    memset(&by, 0, sizeof(by));
    by.scale = (FPS_REAL)(hyper->flags & FPS_HYPER_MAXIMIZE ? -scale : scale);
    by.weight_decay = (FPS_REAL)hyper->weight_decay;
    by.shrink = (FPS_REAL)(1 - learning_rate * hyper->weight_decay);
    by.minus_rate = (FPS_REAL)-learning_rate;
    by.momentum = (FPS_REAL)hyper->momentum;
    by.undampened = (FPS_REAL)(1 - hyper->dampening);
    by.beta2 = (FPS_REAL)hyper->beta2;
    by.one_minus_beta2 = (FPS_REAL)(1 - hyper->beta2);
    by.lerp = fps_lerp_of(1 - hyper->beta2);
    by.epsilon = (FPS_REAL)hyper->epsilon;
    by.flags = fps_flags_of(rule, hyper, steps);
    by.hyper = *hyper;
    by.hyper.learning_rate = learning_rate;
    by.steps = steps;
#define FPS_CORRECT(number, NAME, name, planes, at_once, writes, checked, correct) \
    case number: correct(&by, hyper, learning_rate, (double)steps); break;
    switch (rule) { FPS_UPDATE_RULES(FPS_CORRECT) }
#undef FPS_CORRECT
    return by;
}

/* The larger magnitude of two, as bits: those of an infinity or a NaN are larger than those of any number. */
static inline __attribute__((always_inline)) FPS_REAL_BITS fps_larger(FPS_REAL_BITS most, FPS_REAL value) {
    FPS_REAL_BITS bits;
    memcpy(&bits, &value, sizeof(bits));
    bits &= FPS_SIGNLESS;
    return bits > most ? bits : most;
}

static inline int fps_is_present(const fps_push *push, int32_t parameter) {
    return (push->presence[parameter >> 6] >> (parameter & 63)) & 1;
}

static inline double fps_rate(const fps_push *push, int32_t group) {
    return push->hypers[group].learning_rate * push->rate_scale;
}

/* Mean learning rate of the pushes; the exact common rate if all are equal. */
static double fps_mean_rate(const fps_push *pushes, int count, int32_t group) {
    double total = 0, first = fps_rate(&pushes[0], group);
    int equal = 1;
    for (int push = 0; push < count; push++) {
        double rate = fps_rate(&pushes[push], group);
        total += rate;
        equal &= rate == first;
    }
    return equal ? first : total / count;
}

#endif
