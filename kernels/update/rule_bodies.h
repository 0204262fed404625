/* The arithmetic of each update rule on one element, for the folds on the CPU and on a GPU. The includer defines FPS_REAL, the
 * type of a number; FPS_RULE_BODY(name), the head of a function (by, weight, step, state, flags) that returns the new weight;
 * FPS_MULTIPLY_ADD, FPS_SQUARE_ROOT, FPS_MAGNITUDE, FPS_QUOTIENT (number, divisor, inverse of the divisor), and FPS_LERP (by,
 * start, end).
 *
 * `step` is the summed and scaled gradient, `state` the element's state planes, updated in place, and `flags` the variant. A
 * body does what torch's single-tensor optimizer does, in torch's order, with a fused multiply-add exactly where ATen has one,
 * so the bits are torch's. It includes nothing, because NVRTC has no headers. */

/* The larger of two as torch.maximum has it: a NaN if either is one. Without short cuts, which would be branches. */
#ifndef FPS_MAXIMUM
#define FPS_MAXIMUM(a, b) (((a) > (b)) | ((a) != (a)) ? (a) : (b))
#endif

/* torch.optim.SGD. State: the momentum buffer. */
FPS_RULE_BODY(sgd) {
    if (flags & FPS_BY_DECAY) step = FPS_MULTIPLY_ADD(weight, by->weight_decay, step);
    if (flags & FPS_BY_MOMENTUM) {
        FPS_REAL buffer = flags & FPS_BY_FIRST ? step : FPS_MULTIPLY_ADD(step, by->undampened, state[0] * by->momentum);
        state[0] = buffer;
        step = flags & FPS_BY_NESTEROV ? FPS_MULTIPLY_ADD(buffer, by->momentum, step) : buffer;
    }
    return FPS_MULTIPLY_ADD(step, by->minus_rate, weight);
}

/* torch.optim.Adam and AdamW: lerp_, mul_, addcmul_, maximum, sqrt, div, add_, addcdiv_. State: the means of gradients and
 * squares, and the largest mean of squares (amsgrad). */
FPS_RULE_BODY(adam) {
    FPS_REAL mean, square, root;
    if (flags & FPS_BY_SHRINK) weight = weight * by->shrink;
    if (flags & FPS_BY_DECAY) step = FPS_MULTIPLY_ADD(weight, by->weight_decay, step);
    mean = FPS_LERP(by, state[0], step);
    square = FPS_MULTIPLY_ADD(by->one_minus_beta2 * step, step, state[1] * by->beta2);
    state[0] = mean;
    state[1] = square;
    if (flags & FPS_BY_AMSGRAD) square = state[2] = FPS_MAXIMUM(state[2], square);
    root = FPS_QUOTIENT(FPS_SQUARE_ROOT(square), by->root_correction2, by->inverse_root_correction2);
    return weight + (by->minus_rate * mean) / (root + by->epsilon);
}

/* torch.optim.Adagrad: addcmul_, sqrt, add_, addcdiv_. State: the sum of squares. */
FPS_RULE_BODY(adagrad) {
    if (flags & FPS_BY_DECAY) step = FPS_MULTIPLY_ADD(weight, by->weight_decay, step);
    state[0] = FPS_MULTIPLY_ADD(step, step, state[0]);
    return weight + (by->minus_rate * step) / (FPS_SQUARE_ROOT(state[0]) + by->epsilon);
}

/* torch.optim.RMSprop: mul_, addcmul_, centered lerp_ and addcmul, sqrt, add_, then addcdiv_, or with momentum mul_, addcdiv_
 * and add_. State: the mean of squares, the momentum buffer, the mean of gradients. */
FPS_RULE_BODY(rmsprop) {
    FPS_REAL variance, root;
    if (flags & FPS_BY_DECAY) step = FPS_MULTIPLY_ADD(weight, by->weight_decay, step);
    variance = state[0] = FPS_MULTIPLY_ADD(by->one_minus_beta2 * step, step, state[0] * by->beta2);
    if (flags & FPS_BY_CENTERED) {
        state[2] = FPS_LERP(by, state[2], step);
        variance = FPS_MULTIPLY_ADD(-state[2], state[2], variance);
    }
    root = FPS_SQUARE_ROOT(variance) + by->epsilon;
    if (!(flags & FPS_BY_MOMENTUM)) return weight + (by->minus_rate * step) / root;
    state[1] = state[1] * by->momentum + step / root;
    return FPS_MULTIPLY_ADD(state[1], by->minus_rate, weight);
}

/* torch.optim.NAdam: lerp_, mul_, addcmul_, div, sqrt, add_, addcdiv_ of the gradient, addcdiv_ of the mean. State: the means
 * of gradients and squares. A square may be subnormal, so it is divided and not multiplied (FPS_QUOTIENT). */
FPS_RULE_BODY(nadam) {
    FPS_REAL root;
    if (flags & FPS_BY_SHRINK) weight = weight * by->shrink;
    if (flags & FPS_BY_DECAY) step = FPS_MULTIPLY_ADD(weight, by->weight_decay, step);
    state[0] = FPS_LERP(by, state[0], step);
    state[1] = FPS_MULTIPLY_ADD(by->one_minus_beta2 * step, step, state[1] * by->beta2);
    root = FPS_SQUARE_ROOT(state[1] / by->correction) + by->epsilon;
    weight = weight + (by->gradient_rate * step) / root;
    return weight + (by->minus_rate * state[0]) / root;
}

/* torch.optim.RAdam: lerp_, mul_, addcmul_, div, mul, and once rectified sqrt, add_, reciprocal, mul three times; add_. State:
 * the means of gradients and squares. */
FPS_RULE_BODY(radam) {
    FPS_REAL update;
    if (flags & FPS_BY_SHRINK) weight = weight * by->shrink;
    if (flags & FPS_BY_DECAY) step = FPS_MULTIPLY_ADD(weight, by->weight_decay, step);
    state[0] = FPS_LERP(by, state[0], step);
    state[1] = FPS_MULTIPLY_ADD(by->one_minus_beta2 * step, step, state[1] * by->beta2);
    update = state[0] / by->correction * by->minus_rate;
    if (flags & FPS_BY_RECTIFIED)
        update = update * (1.0f / (FPS_SQUARE_ROOT(state[1]) + by->epsilon) * by->root_correction2) * by->rectification;
    return weight + update;
}

/* torch.optim.Adamax: lerp_, mul_, abs, add_, maximum, addcdiv_. State: the mean of gradients, and their decayed maximum. */
FPS_RULE_BODY(adamax) {
    FPS_REAL decayed, magnitude;
    if (flags & FPS_BY_DECAY) step = FPS_MULTIPLY_ADD(weight, by->weight_decay, step);
    state[0] = FPS_LERP(by, state[0], step);
    decayed = state[1] * by->beta2;
    magnitude = FPS_MAGNITUDE(step) + by->epsilon;
    state[1] = FPS_MAXIMUM(decayed, magnitude);
    return weight + (by->minus_rate * state[0]) / state[1];
}

/* torch.optim.Adadelta: mul_, addcmul_, add, sqrt_ (of each), div_, mul_, mul_, addcmul_, add_. State: the means of the squares
 * of gradients and of steps. */
FPS_RULE_BODY(adadelta) {
    FPS_REAL change;
    if (flags & FPS_BY_DECAY) step = FPS_MULTIPLY_ADD(weight, by->weight_decay, step);
    state[0] = FPS_MULTIPLY_ADD(by->one_minus_beta2 * step, step, state[0] * by->beta2);
    change = FPS_SQUARE_ROOT(state[1] + by->epsilon) / FPS_SQUARE_ROOT(state[0] + by->epsilon) * step;
    state[1] = FPS_MULTIPLY_ADD(by->one_minus_beta2 * change, change, state[1] * by->beta2);
    return FPS_MULTIPLY_ADD(change, by->minus_rate, weight);
}
