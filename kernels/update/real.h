/* The type of a fold's numbers. Everything that a fold compiles is compiled twice: with floats, and in a file of its own, which
 * defines FPS_DOUBLE, with doubles. An arena counts in floats, so there a double is two of them. */
#ifndef FPS_REAL_H
#define FPS_REAL_H

#include <stdint.h>

#ifdef FPS_DOUBLE
#define FPS_REAL double
#define FPS_REAL_BITS int64_t /* an integer as long */
#define FPS_SIGNLESS 0x7fffffffffffffff
#define FPS_INFINITY_BITS 0x7ff0000000000000 /* of an infinity: a magnitude is finite if its bits are below */
#define FPS_REAL_TYPE FPS_FLOAT64
#define FPS_REAL_FUNCTION(name) __builtin_##name
#define FPS_VECTOR(type) type##d    /* of the instruction sets: __m128d */
#define FPS_OF_VECTOR(name) name##d /* _mm_stream_pd */
#define FPS_AT_ONCE(given) 1 /* memory limits a fold of doubles, and more loops would cost each install their compilation */
#else
#define FPS_REAL float
#define FPS_REAL_BITS int32_t
#define FPS_SIGNLESS 0x7fffffff
#define FPS_INFINITY_BITS 0x7f800000
#define FPS_REAL_TYPE FPS_FLOAT32
#define FPS_REAL_FUNCTION(name) __builtin_##name##f
#define FPS_VECTOR(type) type
#define FPS_OF_VECTOR(name) name##s
#define FPS_AT_ONCE(given) given
#endif

#define FPS_REAL_FLOATS ((int64_t)(sizeof(FPS_REAL) / sizeof(float))) /* floats of an arena that a number takes */
#define FPS_LINE_REALS (16 / (int)FPS_REAL_FLOATS) /* numbers of a cache line */
#define FPS_ON_LINE __attribute__((aligned(64)))   /* begins on one */

#endif
