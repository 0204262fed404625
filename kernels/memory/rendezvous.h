/* The answering thread: hands the arena's memfd and this process's pidfd to each client that may have them.
 *
 * It is a plain pthread that never takes the interpreter's lock, so a joiner gets its answer while Python is busy.
 * It serves one client after the other, in at most FPS_CLIENT_SECONDS each, keeps
 * nothing but the first layout that differed from ours, and waits in poll() only. (Python.h, included before, asks for
 * the GNU names.)
 *
 * A client connects and sends fps_hello and then its layout's text; it gets fps_offer, with both descriptors when the
 * status is FPS_OFFER_OK, or followed by our layout's text when it is FPS_OFFER_LAYOUT_DIFFERS. The first 16 bytes of
 * both messages stay as they are in every ABI, so that two versions can still tell each other which they are. */
#ifndef FPS_RENDEZVOUS_H
#define FPS_RENDEZVOUS_H

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/old_glibc.h"

#define FPS_HELLO_MAGIC 0x6670732d68656c6fULL  /* "fps-helo" */
#define FPS_OFFER_MAGIC 0x6670732d616e7377ULL /* "fps-answ" */
#define FPS_HELLO_OBSERVER 1u                  /* flag: will only look, so its layout does not matter */
#define FPS_PREFIX_BYTES 16
#define FPS_HASH_BYTES 32
#define FPS_NAME_BYTES ((ptrdiff_t)sizeof(((struct sockaddr_un *)0)->sun_path))
#define FPS_MAX_LAYOUT_BYTES (64u << 20)
#define FPS_CLIENT_SECONDS 1
#define FPS_RETRY_MS 10

#define FPS_OFFER_OK 0
#define FPS_OFFER_ABI_DIFFERS 1
#define FPS_OFFER_LAYOUT_DIFFERS 2
#define FPS_OFFER_BAD_HELLO 3
#define FPS_OFFER_REFUSED 4 /* the client belongs to another user */

typedef struct {
    uint64_t magic;
    uint32_t abi, flags;
    unsigned char layout_hash[FPS_HASH_BYTES];
    uint64_t layout_length; /* bytes of text that follow */
} fps_hello;
_Static_assert(sizeof(fps_hello) == 56, "no padding: it is sent as it lies");
_Static_assert(offsetof(fps_hello, layout_hash) == FPS_PREFIX_BYTES, "what every ABI understands");

typedef struct {
    uint64_t magic;
    uint32_t abi, status;
    int32_t place;
    uint32_t reserved;
    uint64_t layout_length; /* bytes of text that follow */
} fps_offer;
_Static_assert(sizeof(fps_offer) == 32, "no padding: it is sent as it lies");
_Static_assert(offsetof(fps_offer, place) == FPS_PREFIX_BYTES, "what every ABI understands");

typedef struct {
    pthread_t thread;
    pid_t process_id;             /* whose thread it is: a forked child has this struct, but no thread */
    int socket_fd, memfd, pidfd;
    int stop;                     /* eventfd: readable when the thread shall end */
    int timer;                    /* timerfd: readable when the present client has had its time */
    int client;                   /* being served, or -1; read by others only in a forked child */
    uid_t user;                   /* the only user that gets an answer */
    uint32_t abi;
    int32_t place;
    unsigned char layout_hash[FPS_HASH_BYTES];
    char *layout;
    uint64_t layout_length;
    pthread_mutex_t foreign_lock; /* guards the next two, which change once */
    char *foreign;                /* first layout that differed, or NULL */
    uint64_t foreign_length;
} fps_listener;

/* -- one client --------------------------------------------------------------------------------------------------- */

/* Wait until the client is ready for `events`; -1 when its time is up or the thread shall end. One timer for all of a
 * client's bytes: a limit on each receive alone would let a client that drips them hold the thread for days. */
static int fps_client_ready(const fps_listener *a, int client, short events) {
    struct pollfd polled[3] = {{a->stop, POLLIN, 0}, {a->timer, POLLIN, 0}, {client, events, 0}};
    while (poll(polled, 3, -1) < 0)
        if (errno != EINTR) return -1;
    return polled[0].revents || polled[1].revents ? -1 : 0;
}

/* Receive exactly `length` bytes. There is no room for control messages: the kernel closes descriptors sent to us. */
static int fps_client_receive(const fps_listener *a, int client, void *target, size_t length) {
    while (length) {
        ssize_t count = recv(client, target, length, MSG_DONTWAIT);
        if (count == 0) return -1;
        if (count < 0) {
            if ((errno != EAGAIN && errno != EINTR) || fps_client_ready(a, client, POLLIN) < 0) return -1;
            continue;
        }
        target = (char *)target + count;
        length -= (size_t)count;
    }
    return 0;
}

/* Send exactly `length` bytes; `message` may carry descriptors, which leave with the first of them. */
static int fps_client_send(const fps_listener *a, int client, const void *source, size_t length,
                           struct msghdr *message) {
    struct iovec part;
    message->msg_iov = &part;
    message->msg_iovlen = 1;
    while (length) {
        part.iov_base = (void *)source;
        part.iov_len = length;
        ssize_t count = sendmsg(client, message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count < 0) {
            if ((errno != EAGAIN && errno != EINTR) || fps_client_ready(a, client, POLLOUT) < 0) return -1;
            continue;
        }
        message->msg_control = NULL;
        message->msg_controllen = 0;
        source = (const char *)source + count;
        length -= (size_t)count;
    }
    return 0;
}

/* The answer with what belongs to its status. A client that is gone by now misses it; there is nobody to tell. */
static void fps_client_offer(const fps_listener *a, int client, uint32_t status) {
    fps_offer answer = {.magic = FPS_OFFER_MAGIC, .abi = a->abi, .status = status, .place = a->place};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control;
    struct msghdr message = {0};
    if (status == FPS_OFFER_OK) {
        const int descriptors[2] = {a->memfd, a->pidfd};
        memset(&control, 0, sizeof(control));
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof(control.bytes);
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN(sizeof(descriptors));
        memcpy(CMSG_DATA(&control.header), descriptors, sizeof(descriptors));
    } else if (status == FPS_OFFER_LAYOUT_DIFFERS) {
        answer.layout_length = a->layout_length;
    }
    if (fps_client_send(a, client, &answer, sizeof(answer), &message) == 0)
        fps_client_send(a, client, a->layout, answer.layout_length, &message);
}

/* Receive the layout that differs. The first one is kept, since this process's Python shall name the difference too. */
static int fps_client_keep_layout(fps_listener *a, int client, uint64_t length) {
    char *text = malloc(length ? length : 1);
    if (!text || fps_client_receive(a, client, text, length) < 0) {
        free(text);
        return -1;
    }
    if (length && !a->foreign) { /* only this thread writes it, so it may look without the lock */
        pthread_mutex_lock(&a->foreign_lock);
        a->foreign = text;
        a->foreign_length = length;
        pthread_mutex_unlock(&a->foreign_lock);
    } else {
        free(text);
    }
    return 0;
}

/* Receive a client's hello. Returns the status of the answer, or -1 for a client that is not answered. */
static int fps_client_status(fps_listener *a, int client) {
    struct ucred peer;
    socklen_t peer_bytes = sizeof(peer);
    fps_hello hello;
    if (getsockopt(client, SOL_SOCKET, SO_PEERCRED, &peer, &peer_bytes) < 0 || peer.uid != a->user) return FPS_OFFER_REFUSED;
    if (fps_client_receive(a, client, &hello, FPS_PREFIX_BYTES) < 0) return -1;
    if (hello.magic != FPS_HELLO_MAGIC) return FPS_OFFER_BAD_HELLO;
    if (hello.abi != a->abi) return FPS_OFFER_ABI_DIFFERS; /* before the rest is read: another ABI's hello may be shorter */
    if (fps_client_receive(a, client, hello.layout_hash, sizeof(hello) - FPS_PREFIX_BYTES) < 0) return -1;
    if (hello.flags & ~FPS_HELLO_OBSERVER || hello.layout_length > FPS_MAX_LAYOUT_BYTES) return FPS_OFFER_BAD_HELLO;
    if (hello.flags & FPS_HELLO_OBSERVER || memcmp(hello.layout_hash, a->layout_hash, FPS_HASH_BYTES) == 0)
        return FPS_OFFER_OK; /* its text, if any, is not read: it tells nothing new */
    return fps_client_keep_layout(a, client, hello.layout_length) < 0 ? -1 : FPS_OFFER_LAYOUT_DIFFERS;
}

/* -- the thread --------------------------------------------------------------------------------------------------- */

static void *fps_listener_run(void *argument) {
    fps_listener *a = argument;
    const struct itimerspec limit = {.it_value = {.tv_sec = FPS_CLIENT_SECONDS}};
    struct pollfd polled[2] = {{a->stop, POLLIN, 0}, {a->socket_fd, POLLIN, 0}};
    for (;;) {
        if (poll(polled, 2, -1) < 0) continue;
        if (polled[0].revents) return NULL;
        int client = accept4(a->socket_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (client < 0) {
            /* Either the client has gone, or descriptors have run out: then the socket_fd stays readable, and a pause
             * keeps this loop from eating a core until somebody closes one. */
            poll(polled, 1, FPS_RETRY_MS);
            continue;
        }
        a->client = client;
        timerfd_settime(a->timer, 0, &limit, NULL); /* also forgets that the last client's time was up */
        const int status = fps_client_status(a, client);
        if (status >= 0) fps_client_offer(a, client, (uint32_t)status);
        /* A child forked in between may hold a copy of the socket; the shutdown ends the conversation all the same. The
         * number is forgotten before it is closed: a child must not close what another thread opened under it since. */
        shutdown(client, SHUT_RDWR);
        a->client = -1;
        close(client);
    }
}

/* Let go of everything but the thread, in this process only: processes that share the descriptors are not affected. */
static void fps_listener_discard(fps_listener *a) {
    const int descriptors[6] = {a->socket_fd, a->memfd, a->pidfd, a->stop, a->timer, a->client};
    for (int i = 0; i < 6; i++)
        if (descriptors[i] >= 0) close(descriptors[i]);
    free(a->layout);
    free(a->foreign);
    free(a);
}

static int fps_listener_bind(const char *name, size_t name_bytes) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int socket_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (socket_fd < 0) return -1;
    memcpy(address.sun_path, name, name_bytes);
    /* The exact length, not sizeof(address): an abstract name is all the bytes that it is given. */
    if (bind(socket_fd, (struct sockaddr *)&address, offsetof(struct sockaddr_un, sun_path) + name_bytes) < 0
        || listen(socket_fd, SOMAXCONN) < 0) {
        int error = errno;
        close(socket_fd);
        errno = error;
        return -1;
    }
    return socket_fd;
}

/* The thread inherits the mask of its maker: with all signals blocked from its first instruction on, each of them goes
 * to a thread that knows what to do with it, Ctrl-C to Python's main thread. */
static int fps_listener_create_thread(fps_listener *a) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&a->thread, NULL, fps_listener_run, a);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error) pthread_setname_np(a->thread, "fastps-answer"); /* shown by top and debuggers */
    return error;
}

/* Begin to answer at `name`; descriptors and layout are duplicated. NULL and errno on failure, with nothing left. */
static fps_listener *fps_listener_start(const char *name, size_t name_bytes, int memfd, int pidfd, uid_t user,
                                      uint32_t abi, int32_t place, const unsigned char *layout_hash,
                                      const char *layout, uint64_t layout_length) {
    fps_listener *a = calloc(1, sizeof(*a));
    if (!a) return NULL;
    a->socket_fd = a->memfd = a->pidfd = a->stop = a->timer = a->client = -1;
    a->process_id = getpid();
    a->user = user;
    a->abi = abi;
    a->place = place;
    memcpy(a->layout_hash, layout_hash, FPS_HASH_BYTES);
    a->layout_length = layout_length;
    pthread_mutex_init(&a->foreign_lock, NULL);
    int error = 0;
    if (!(a->layout = malloc(layout_length ? layout_length : 1)) || (a->memfd = fcntl(memfd, F_DUPFD_CLOEXEC, 0)) < 0
        || (a->pidfd = fcntl(pidfd, F_DUPFD_CLOEXEC, 0)) < 0 || (a->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) < 0
        || (a->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) < 0
        || (a->socket_fd = fps_listener_bind(name, name_bytes)) < 0) {
        error = errno;
    } else {
        memcpy(a->layout, layout, layout_length);
        error = fps_listener_create_thread(a);
    }
    if (error) {
        fps_listener_discard(a);
        errno = error;
        return NULL;
    }
    return a;
}

/* End the thread and let go of everything. Takes no longer than what the thread is doing between two polls. In a
 * forked child there is no thread to join, and a write to the shared eventfd would end the parent's thread: it
 * only lets go. */
static void fps_listener_stop(fps_listener *a) {
    if (a->process_id == getpid()) {
        eventfd_write(a->stop, 1);
        pthread_join(a->thread, NULL);
    }
    fps_listener_discard(a);
}

/* The first layout that differed, or NULL. Never waits: while the thread is just writing it, there is none yet. Once
 * there, it stays until the listener is stopped. */
static const char *fps_listener_foreign(fps_listener *a, uint64_t *length) {
    if (pthread_mutex_trylock(&a->foreign_lock) != 0) return NULL;
    const char *text = a->foreign;
    *length = a->foreign_length;
    pthread_mutex_unlock(&a->foreign_lock);
    return text;
}

#endif
