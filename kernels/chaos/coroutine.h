/* Coroutines for the simulated processes: each has a stack of its own, and one runs at a time, in
 * one thread.
 *
 * A switch is a setjmp and a longjmp, without the system call of swapcontext; only a coroutine's first step needs a context. A
 * coroutine that is never resumed needs no clean-up: that is how a worker dies. For tests only:
 * glibc's checked longjmp refuses to change stacks, so modules that include this are compiled with -U_FORTIFY_SOURCE. */
#ifndef FPS_COROUTINE_H
#define FPS_COROUTINE_H

#include <setjmp.h>
#include <stdint.h>
#include <sys/mman.h>
#include <ucontext.h>

#define FPS_STACK_BYTES (1 << 20) /* untouched pages cost nothing */

typedef struct {
    jmp_buf place;
    void *stack;
    void (*body)(int);
    int number, has_begun;
} fps_coroutine;

static jmp_buf fps_coroutine_home;

/* Give the coroutine its stack, once; false if there is no memory for it. */
static int fps_coroutine_make(fps_coroutine *c) {
    c->stack = mmap(NULL, FPS_STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return c->stack != MAP_FAILED;
}
static void fps_coroutine_free(fps_coroutine *c) {
    if (c->stack) munmap(c->stack, FPS_STACK_BYTES);
}
/* Run `body(number)` from its beginning when it is resumed next; what ran on this stack before is forgotten. */
static void fps_coroutine_begin(fps_coroutine *c, void (*body)(int), int number) {
    c->body = body;
    c->number = number;
    c->has_begun = 0;
}
/* Switch back to the resumer; returns when resumed again. */
static void fps_coroutine_yield(fps_coroutine *c) {
    if (_setjmp(c->place) == 0) _longjmp(fps_coroutine_home, 1);
}
static void fps_coroutine_run(unsigned high, unsigned low) {
    fps_coroutine *c = (fps_coroutine *)(((uintptr_t)high << 32) | low);
    c->body(c->number);
    _longjmp(fps_coroutine_home, 1);
}
/* Run until it yields or ends. */
static void fps_coroutine_resume(fps_coroutine *c) {
    if (_setjmp(fps_coroutine_home)) return;
    if (c->has_begun) _longjmp(c->place, 1);
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = c->stack;
    context.uc_stack.ss_size = FPS_STACK_BYTES;
    context.uc_link = NULL;
    makecontext(&context, (void (*)(void))fps_coroutine_run, 2, (unsigned)((uintptr_t)c >> 32), (unsigned)(uintptr_t)c);
    c->has_begun = 1;
    setcontext(&context);
}

#endif
