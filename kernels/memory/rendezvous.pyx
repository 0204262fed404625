"""The listening thread as a Python object, and its messages as bytes."""

from libc.errno cimport errno
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset, strerror

cdef extern from "memory/rendezvous.h" nogil:
    const uint64_t FPS_HELLO_MAGIC, FPS_OFFER_MAGIC
    const uint32_t FPS_HELLO_OBSERVER
    const Py_ssize_t FPS_PREFIX_BYTES, FPS_HASH_BYTES, FPS_NAME_BYTES, FPS_MAX_LAYOUT_BYTES
    cpdef enum:
        OK "FPS_OFFER_OK", ABI_DIFFERS "FPS_OFFER_ABI_DIFFERS", LAYOUT_DIFFERS "FPS_OFFER_LAYOUT_DIFFERS"
        BAD_HELLO "FPS_OFFER_BAD_HELLO", REFUSED "FPS_OFFER_REFUSED"

    ctypedef struct fps_hello:
        uint64_t magic
        uint32_t abi, flags
        unsigned char *layout_hash
        uint64_t layout_length

    ctypedef struct fps_offer:
        uint64_t magic
        uint32_t abi, status
        int32_t place
        uint64_t layout_length

    ctypedef struct fps_listener:
        pass

    fps_listener *fps_listener_start(
        const char *name, size_t name_bytes, int memfd, int pidfd, unsigned int user, uint32_t abi, int32_t place,
        const unsigned char *layout_hash, const char *layout, uint64_t layout_length)
    void fps_listener_stop(fps_listener *listener)
    const char *fps_listener_foreign(fps_listener *listener, uint64_t *length)

PREFIX_BYTES = FPS_PREFIX_BYTES
OFFER_BYTES = sizeof(fps_offer)
NAME_BYTES = FPS_NAME_BYTES
MAX_LAYOUT_BYTES = FPS_MAX_LAYOUT_BYTES


cdef class Listener:
    """A thread that listens at the abstract socket `name` until it is closed, and offers the arena to clients.

    Args:
        name: at most NAME_BYTES bytes, of which the first is zero: such a name is in no file system.
        memfd, pidfd: what a client gets; duplicated, so the caller keeps its own and may close them.
        abi, place: told to every client; `place` is the lane, or -1 for the process that created the arena.
        layout_hash: 32 bytes. A client with another hash that is no observer gets `layout` instead of the descriptors.
        layout: UTF-8 text, copied.
        user: user id of the only user that gets an offer.

    Raises ValueError for an argument out of range, and OSError when the name is taken or descriptors have run out.
    """

    cdef fps_listener *listener

    def __init__(self, bytes name not None, int memfd, int pidfd, uint32_t abi, bytes layout_hash not None,
                 bytes layout not None, int32_t place, unsigned int user):
        if self.listener is not NULL:
            raise ValueError("expected a new listener, found one that listens already; make another one")
        if not 2 <= len(name) <= FPS_NAME_BYTES or name[0] != 0:
            raise ValueError(
                f"expected a name of 2 to {FPS_NAME_BYTES} bytes that begins with a zero byte, found {name!r}")
        _check_layout(layout_hash, len(layout))
        # One call that keeps the GIL: no thread can fork between the opening of a descriptor and its registration here.
        self.listener = fps_listener_start(
            name, len(name), memfd, pidfd, user, abi, place, layout_hash, layout, len(layout))
        if self.listener is NULL:
            error = errno
            shown = name[1:].decode(errors="replace")
            raise OSError(error, f"cannot answer at {shown!r}: {strerror(error).decode()}")

    def close(self):
        """End the thread, free the name, close what the listener holds. May be called twice.

        In a forked child, which has no thread: close its copies, above all the socket, which may not outlive the parent.
        """
        listener, self.listener = self.listener, NULL
        if listener is not NULL:
            # The GIL is kept: the thread never takes it and ends at its next poll, and no thread can fork in between.
            fps_listener_stop(listener)

    def foreign_layout(self):
        """Text of the first client's layout that differed from ours, or None. Never waits; None after close."""
        cdef uint64_t length
        cdef const char *text
        if self.listener is NULL:
            return None
        text = fps_listener_foreign(self.listener, &length)
        if text is NULL:
            return None
        return text[:length].decode("utf-8", "replace")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __dealloc__(self):
        if self.listener is not NULL:
            fps_listener_stop(self.listener)


def pack_hello(uint32_t abi, bytes layout_hash not None, uint64_t layout_length, bint observer):
    """The bytes that a client sends first; its layout's text follows. Raises ValueError as `Listener` does."""
    cdef fps_hello hello
    _check_layout(layout_hash, layout_length)
    memset(&hello, 0, sizeof(hello))
    hello.magic, hello.abi, hello.layout_length = FPS_HELLO_MAGIC, abi, layout_length
    hello.flags = FPS_HELLO_OBSERVER if observer else 0
    memcpy(hello.layout_hash, <const char *> layout_hash, FPS_HASH_BYTES)
    return (<const char *> &hello)[:sizeof(hello)]


def abi_of(bytes data not None):
    """The ABI in the first PREFIX_BYTES bytes of an offer; None if these are not an offer's."""
    cdef fps_offer answer
    if len(data) < FPS_PREFIX_BYTES:
        raise ValueError(f"expected at least {FPS_PREFIX_BYTES} bytes, found {len(data)}")
    memcpy(&answer, <const char *> data, FPS_PREFIX_BYTES)
    return answer.abi if answer.magic == FPS_OFFER_MAGIC else None


def unpack_offer(bytes data not None):
    """Status, place, and length of the layout's text that follows, in the OFFER_BYTES bytes of an offer."""
    cdef fps_offer answer
    if len(data) != sizeof(answer):
        raise ValueError(f"expected {sizeof(answer)} bytes, found {len(data)}")
    memcpy(&answer, <const char *> data, sizeof(answer))
    return answer.status, answer.place, answer.layout_length


cdef _check_layout(bytes layout_hash, uint64_t layout_length):
    if len(layout_hash) != FPS_HASH_BYTES:
        raise ValueError(f"expected a layout hash of {FPS_HASH_BYTES} bytes, found {len(layout_hash)}")
    if layout_length > <uint64_t> FPS_MAX_LAYOUT_BYTES:
        raise ValueError(f"expected a layout of at most {FPS_MAX_LAYOUT_BYTES} bytes of text, found {layout_length}")
