/* Includes a file of loops once for each instruction set; it defines its functions as FPS_ISA(name). The includer defines FPS_LOOPS,
 * the file's name in quotes, and chooses among what it defined by FPS_OF_ISA at run time. */
#define FPS_ISA(name) name##_baseline
#include FPS_LOOPS
#undef FPS_ISA

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define FPS_ISA(name) name##_avx2
#include FPS_LOOPS
#undef FPS_ISA
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,fma,prefer-vector-width=512")
#define FPS_ISA(name) name##_avx512
#include FPS_LOOPS
#undef FPS_ISA
#pragma GCC pop_options
#endif
#undef FPS_LOOPS

#ifndef FPS_OF_ISA
#define FPS_ISA_BASELINE 0
#define FPS_ISA_AVX2 1
#define FPS_ISA_AVX512 2
#if defined(__x86_64__)
#define FPS_OF_ISA(isa, name) ((isa) == FPS_ISA_AVX512 ? name##_avx512 : (isa) == FPS_ISA_AVX2 ? name##_avx2 : name##_baseline)
#else
#define FPS_OF_ISA(isa, name) ((void)(isa), name##_baseline)
#endif

/* Whether this machine has an instruction set. */
static inline int fps_isa_available(int isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (isa == FPS_ISA_AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (isa == FPS_ISA_AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
               && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("fma");
#endif
    return isa == FPS_ISA_BASELINE;
}
#endif
