/* Thread functions by the first version of their symbols, so that a wheel runs on glibc 2.28 wherever it was built.
 *
 * glibc 2.32 and 2.34 moved these functions into libc.so under new symbol versions, with the same behaviour, and the linker takes
 * the newest version that it sees. A sanitizer replaces them by functions without versions, and other C libraries have none. */
#ifndef FPS_OLD_GLIBC_H
#define FPS_OLD_GLIBC_H

#include <features.h>

#if defined(__x86_64__)
#define FPS_FIRST_GLIBC "GLIBC_2.2.5"
#define FPS_FIRST_SETNAME "GLIBC_2.12"
#elif defined(__aarch64__)
#define FPS_FIRST_GLIBC "GLIBC_2.17"
#define FPS_FIRST_SETNAME "GLIBC_2.17"
#endif

#if defined(__GLIBC__) && defined(FPS_FIRST_GLIBC) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
__asm__(".symver pthread_create, pthread_create@" FPS_FIRST_GLIBC);
__asm__(".symver pthread_join, pthread_join@" FPS_FIRST_GLIBC);
__asm__(".symver pthread_mutex_trylock, pthread_mutex_trylock@" FPS_FIRST_GLIBC);
__asm__(".symver pthread_sigmask, pthread_sigmask@" FPS_FIRST_GLIBC);
__asm__(".symver pthread_setname_np, pthread_setname_np@" FPS_FIRST_SETNAME);
#endif

#endif
