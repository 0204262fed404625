/* Loops between halves and floats, compiled once for each instruction set: the includer defines FPS_ISA(name). */

/* IEEE half precision, exactly: exponents move by 112, and those of infinities and NaNs by 112 again. A subnormal half gets an
 * implicit bit that is then subtracted as a float. No subnormal float is read or written on the way. */
static void FPS_ISA(widen_float16)(float *restrict wide, const uint16_t *restrict halves, int64_t length) {
    const union { uint32_t bits; float value; } implicit = {113u << 23};
    for (int64_t i = 0; i < length; i++) {
        union { uint32_t bits; float value; } number = {(halves[i] & 0x7fffu) << 13};
        uint32_t exponent = number.bits & (0x7c00u << 13);
        number.bits += 112u << 23;
        number.bits += exponent == 0x7c00u << 13 ? 112u << 23 : exponent == 0 ? 1u << 23 : 0;
        number.value -= exponent == 0 ? implicit.value : 0.0f;
        number.bits |= (uint32_t)(halves[i] & 0x8000u) << 16;
        wide[i] = number.value;
    }
}

/* bfloat16 is the upper half of a float. */
static void FPS_ISA(widen_bfloat16)(float *restrict wide, const uint16_t *restrict halves, int64_t length) {
    for (int64_t i = 0; i < length; i++) {
        union { uint32_t bits; float value; } number = {(uint32_t)halves[i] << 16};
        wide[i] = number.value;
    }
}

/* Rounded to the nearest bfloat16, ties to even, as torch rounds; a NaN stays one. */
static void FPS_ISA(narrow_bfloat16)(uint16_t *restrict halves, const float *restrict wide, int64_t length) {
    for (int64_t i = 0; i < length; i++) {
        union { float value; uint32_t bits; } number = {wide[i]};
        uint32_t rounded = (number.bits + 0x7fffu + (number.bits >> 16 & 1)) >> 16;
        halves[i] = (uint16_t)((number.bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
}

/* Rounded to the nearest IEEE half, ties to even, as torch rounds; beyond the largest half an infinity, and a NaN stays one. A
 * result that is subnormal is rounded by a sum of floats: the last digit of a half's smallest step is that of a float near
 * 0.5. */
static void FPS_ISA(narrow_float16)(uint16_t *restrict halves, const float *restrict wide, int64_t length) {
    for (int64_t i = 0; i < length; i++) {
        union { float value; uint32_t bits; } number = {wide[i]}, small;
        int32_t size = number.bits & 0x7fffffff; /* signed, because compilers vectorize no unsigned comparison here */
        int32_t normal = (size - (112 << 23) + 0xfff + (size >> 13 & 1)) >> 13;
        small.bits = size;
        small.value += 0.5f;
        int32_t subnormal = small.bits - 0x3f000000;
        int32_t half = size < 113 << 23 ? subnormal : normal;
        half = size >= 143 << 23 ? 0x7c00 : half;
        half = size > 0x7f800000 ? 0x7e00 : half;
        halves[i] = (uint16_t)((number.bits >> 16 & 0x8000) | half);
    }
}
