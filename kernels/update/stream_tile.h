/* Non-temporal stores, for each instruction set: the includer defines FPS_ISA(name), and undefines the macros at its end. */

#ifndef FPS_DRAIN
#if defined(__x86_64__)
#include <immintrin.h>
#define FPS_DRAIN() _mm_sfence() /* let the stores leave the core before what follows */
#else
#define FPS_DRAIN() ((void)0)
#endif
#endif

#if defined(__AVX512F__)
#define FPS_STREAM_WORD FPS_VECTOR(__m512)
#define FPS_STREAM(address, from) FPS_OF_VECTOR(_mm512_stream_p)(address, FPS_OF_VECTOR(_mm512_load_p)(from))
#elif defined(__AVX2__)
#define FPS_STREAM_WORD FPS_VECTOR(__m256)
#define FPS_STREAM(address, from) FPS_OF_VECTOR(_mm256_stream_p)(address, FPS_OF_VECTOR(_mm256_load_p)(from))
#elif defined(__x86_64__)
#define FPS_STREAM_WORD FPS_VECTOR(__m128)
#define FPS_STREAM(address, from) FPS_OF_VECTOR(_mm_stream_p)(address, FPS_OF_VECTOR(_mm_load_p)(from))
#else
/* C has no portable non-temporal store: plain stores, which are slightly slower because of write allocation. */
#define FPS_STREAM_WORD FPS_REAL
#define FPS_STREAM(address, from) (*(address) = *(from))
#endif

/* Store one cache line: adjacent stores combine. */
static inline __attribute__((always_inline)) void FPS_ISA(stream_line)(FPS_REAL *to, const FPS_REAL *from) {
    for (int i = 0; i < FPS_LINE_REALS; i += (int)(sizeof(FPS_STREAM_WORD) / sizeof(FPS_REAL))) FPS_STREAM(to + i, from + i);
}
