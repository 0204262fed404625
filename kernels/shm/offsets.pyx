"""The arena's words for Python: sizes and offsets as the compiler lays them out, for tests that read or write raw memory."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from fastps.kernels.scheduling.state cimport COMBINED_MOST, OF_WAITING, bucket_t, link_t, scheduler_t, worker_t
from fastps.kernels.shm.arena_h cimport *
from fastps.kernels.update.fold cimport FPS_MAX_PUSHES, fps_segment

cdef extern from "shm/arena.h" nogil:
    """
    typedef struct {
        const char *type, *name;
        size_t offset;
    } fps_header_word;
    static const fps_header_word fps_header_words[] = {
    #define FPS_HEADER_WORD(type, name) {#type, #name, offsetof(fps_header, name)},
        FPS_HEADER_WORDS(FPS_HEADER_WORD)
    #undef FPS_HEADER_WORD
    };
    enum { FPS_N_HEADER_WORDS = sizeof(fps_header_words) / sizeof(fps_header_words[0]) };
    """
    ctypedef struct fps_header_word:
        const char *type
        const char *name
        size_t offset
    enum:
        FPS_N_HEADER_WORDS
    const fps_header_word *fps_header_words

# The scheduler's package does not know the fold's.
if COMBINED_MOST != FPS_MAX_PUSHES:
    raise ImportError(f"expected as many pushes in a combined sum as in a fold, found {COMBINED_MOST} and {FPS_MAX_PUSHES}")

# In bytes.
SIZES = {
    "lane": sizeof(fps_lane), "lane_shard": sizeof(fps_lane_shard), "shard_header": sizeof(fps_shard_header),
    "readers": sizeof(fps_readers), "reader_shard": sizeof(fps_reader_shard), "descriptor": sizeof(fps_descriptor),
    "work": sizeof(fps_work), "push_outcome": sizeof(fps_push_outcome), "folded_push": sizeof(fps_folded_push),
    "scheduler": sizeof(scheduler_t), "worker": sizeof(worker_t), "bucket": sizeof(bucket_t),
    "segment": sizeof(fps_segment), "header": sizeof(fps_header),
}

# In bytes from the struct's begin, by "struct.word".
OFFSETS = {
    "lane.helping": <size_t> &(<fps_lane *> NULL).helping, "lane.tail": <size_t> &(<fps_lane *> NULL).tail,
    "readers.wanted": <size_t> &(<fps_readers *> NULL).wanted, "readers.event": <size_t> &(<fps_readers *> NULL).event,
    "shard_header.lock": <size_t> &(<fps_shard_header *> NULL).lock,
    "shard_header.commit": <size_t> &(<fps_shard_header *> NULL).commit,
    "shard_header.records": <size_t> &(<fps_shard_header *> NULL).records,
    "record.state_buffer": <size_t> &(<fps_record *> NULL).state_buffer,
    "descriptor.slot": <size_t> &(<fps_descriptor *> NULL).slot, "descriptor.kind": <size_t> &(<fps_descriptor *> NULL).kind,
    "work.chunk_floats": <size_t> &(<fps_work *> NULL).chunk_floats, "work.mode": <size_t> &(<fps_work *> NULL).mode,
    "scheduler.policy": <size_t> &(<scheduler_t *> NULL).policy,
    "scheduler.links_offset": <size_t> &(<scheduler_t *> NULL).links_offset,
    "scheduler.buckets_offset": <size_t> &(<scheduler_t *> NULL).buckets_offset,
    "scheduler.lists_offset": <size_t> &(<scheduler_t *> NULL).lists_offset,
    "scheduler.n_workers": <size_t> &(<scheduler_t *> NULL).n_workers,
    "scheduler.n_live": <size_t> &(<scheduler_t *> NULL).n_live,
    "scheduler.n_arrived": <size_t> &(<scheduler_t *> NULL).n_arrived,
    "scheduler.fold_next": <size_t> &(<scheduler_t *> NULL).fold_next,
    "scheduler.grant_next": <size_t> &(<scheduler_t *> NULL).grant_next,
    "scheduler.first_bucket": <size_t> &(<scheduler_t *> NULL).buckets.first,
    "scheduler.last_bucket": <size_t> &(<scheduler_t *> NULL).buckets.last,
    "scheduler.free_bucket": <size_t> &(<scheduler_t *> NULL).free_bucket,
    "scheduler.frontier": <size_t> &(<scheduler_t *> NULL).frontier,
    "scheduler.first_waiting": <size_t> &(<scheduler_t *> NULL).waiting.first,
    "scheduler.n_dirty_workers": <size_t> &(<scheduler_t *> NULL).n_dirty_workers,
    "scheduler.n_dirty_links": <size_t> &(<scheduler_t *> NULL).n_dirty_links,
    "worker.waiting": <size_t> &(<worker_t *> NULL).waiting, "worker.cursor": <size_t> &(<worker_t *> NULL).cursor,
    "worker.next_live": <size_t> &(<worker_t *> NULL).next_live, "bucket.waiting": <size_t> &(<bucket_t *> NULL).waiting,
    "link.next_waiting": <size_t> &(<link_t *> NULL).places[OF_WAITING].next,
}


def header_of(memory):
    """The header's words by name, in their order. Raises ValueError for less memory than a header."""
    cdef const unsigned char[::1] view = memory
    cdef fps_header header
    cdef const char *place
    cdef int index
    if view.shape[0] < <Py_ssize_t> sizeof(header):
        raise ValueError(f"expected a header of {sizeof(header)} bytes, found {view.shape[0]}")
    memcpy(&header, &view[0], sizeof(header))
    found = {}
    for index in range(FPS_N_HEADER_WORDS):
        place = <const char *> &header + fps_header_words[index].offset
        name, kind = fps_header_words[index].name.decode(), fps_header_words[index].type
        if kind == b"uint32_t":
            found[name] = (<const uint32_t *> place)[0]
        elif kind == b"uint64_t":
            found[name] = (<const uint64_t *> place)[0]
        else:
            found[name] = (<const double *> place)[0]
    return found
