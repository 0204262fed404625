/* Views of shared memory that keep what their process writes: private mappings, read-only until the first write.
 *
 * The first write faults. The handler opens the whole view for writing and notes it. From then on each page that is written is a
 * copy of this process's, and the other pages still show the shared memory. A fault elsewhere goes to the handler before ours. */
#ifndef FPS_PRIVATE_VIEW_H
#define FPS_PRIVATE_VIEW_H

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "base/atomics.h"

/* A process has seldom more optimizers and readers at a time; a view beyond has no handler, and is open from its beginning. */
#define FPS_VIEWS 256

typedef struct {
    char *begin; /* null: the place is free */
    size_t bytes;
    int is_open;
} fps_view;
static fps_view fps_views[FPS_VIEWS]; /* never freed: a handler on another thread may read them */

static struct sigaction fps_before; /* the handler that ours was put in front of */
static int fps_passes;              /* whether that one was called, and has not returned */

/* The write faults of a view. Returns whether the view was opened, so that the write may be tried again. */
static int fps_view_open(fps_view *view) {
    fps_view_note(&view->is_open, 1);
    return mprotect(view->begin, view->bytes, PROT_READ | PROT_WRITE) == 0;
}

static int fps_open_at(char *address) {
    for (fps_view *view = fps_views; view < fps_views + FPS_VIEWS; view++) {
        char *begin = fps_view_begin(&view->begin);
        if (begin && address >= begin && address < begin + view->bytes) return fps_view_open(view);
    }
    return 0;
}

/* Whether the program jumped to the address, which is no write. */
static int fps_is_jump(const char *address, const ucontext_t *context) {
#if defined(__x86_64__)
    return (const char *)context->uc_mcontext.gregs[REG_RIP] == address;
#else
    return (const char *)context->uc_mcontext.pc == address;
#endif
}

static void fps_on_fault(int number, siginfo_t *info, void *context) {
    const int reason = errno, is_fault = info->si_code > 0; /* else a process has sent the signal */
    if (is_fault && !fps_is_jump(info->si_addr, context) && fps_open_at(info->si_addr)) {
        errno = reason;
        return;
    }
    /* A handler that was put in front of ours may hand the signal back to ours: the second time ends the process. */
    if (fps_passes++ || fps_before.sa_handler == SIG_DFL || (is_fault && fps_before.sa_handler == SIG_IGN)) {
        signal(number, SIG_DFL);
        if (!is_fault) raise(number); /* a fault comes again by itself */
    } else if (fps_before.sa_flags & SA_SIGINFO) fps_before.sa_sigaction(number, info, context);
    else if (fps_before.sa_handler != SIG_IGN) fps_before.sa_handler(number);
    fps_passes--;
}

/* Put our handler in front, where it is not: another may have been set since. Returns whether it is in front now. */
static int fps_handle_faults(void) {
    struct sigaction present, ours = {.sa_sigaction = fps_on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    if (sigaction(SIGSEGV, NULL, &present)) return 0;
    if (present.sa_sigaction == fps_on_fault) return 1;
    fps_before = present;
    sigemptyset(&ours.sa_mask);
    return sigaction(SIGSEGV, &ours, NULL) == 0;
}

/* In a forked child, which takes no step: it needs no handler from then on, and may set its own. */
static void fps_open_all(void) {
    for (fps_view *view = fps_views; view < fps_views + FPS_VIEWS; view++)
        if (view->begin) fps_view_open(view);
}

/* Make a place for a private mapping. Null, where there is none or no handler may be set. The caller has the GIL. */
static fps_view *fps_view_make(char *begin, size_t bytes) {
    static int is_told;
    for (fps_view *view = fps_views; view < fps_views + FPS_VIEWS; view++) {
        if (fps_view_begin(&view->begin)) continue;
        if (!fps_handle_faults() || (!is_told && pthread_atfork(NULL, NULL, fps_open_all))) return NULL;
        is_told = 1;
        view->bytes = bytes;
        view->is_open = 0;
        fps_view_place(&view->begin, begin);
        return view;
    }
    return NULL;
}

/* Show the shared memory again: what this process has written is gone. */
static void fps_view_renew(fps_view *view) {
    fps_view_note(&view->is_open, 0);
    mprotect(view->begin, view->bytes, PROT_READ);
    madvise(view->begin, view->bytes, MADV_DONTNEED);
}

#endif
