"""C cores that N workers share: whoever computes gets min(1, C / n) of a core, while n workers want one.

That is what a fair scheduler of an operating system does in the mean; processor sharing is also what links.h does with
bandwidth, so a step is a transfer of its processor time over a link that passes C ns a ns on, no more than 1 to each worker.
What a step then waits without a core (sleep, files) takes its time whatever the others do. What it refuses to know: why a step
takes as long.
"""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free

from fastps.kernels.network cimport (
    EVENT_COMPUTED,
    EVENT_CORES,
    fps_link_advance,
    fps_link_begin,
    fps_link_ended,
    fps_link_next_ns,
    fps_queue_free,
    fps_queue_push,
)


cdef class Cores:
    """`count` cores for so many workers, a fraction allowed; 0: a core for each. Raises ValueError for a negative number."""

    def __cinit__(self, double count, int64_t workers):
        if not 0 <= count <= 1e6 or workers < 1:
            raise ValueError(f"expected 0 (one a worker) to 1e6 cores for at least 1 worker, found {count} for {workers}")
        self.count, self.n_workers, self.shared = count, workers, 0 < count < workers
        self.blocked_ns = <int64_t *> calloc(workers, sizeof(int64_t))
        if not self.blocked_ns:
            raise MemoryError()
        self.link.bandwidth, self.link.most, self.link.scheduled_ns = count, 1.0, -1

    def __dealloc__(self):
        free(self.blocked_ns)
        fps_queue_free(&self.link.progress)

    cdef int begin(self, fps_queue *queue, int64_t now_ns, int32_t worker, int64_t cpu_ns, int64_t blocked_ns) noexcept nogil:
        """A worker begins a step; EVENT_COMPUTED comes when it has it. -1 when there is no memory."""
        if not self.shared or cpu_ns < 1:
            return fps_queue_push(queue, now_ns + cpu_ns + blocked_ns, EVENT_COMPUTED, worker)
        self.blocked_ns[worker] = blocked_ns
        if fps_link_begin(&self.link, now_ns, <double> cpu_ns, worker) < 0:
            return -1
        return self._schedule(queue)

    cdef int _schedule(self, fps_queue *queue) noexcept nogil:
        """Let the event come when the next step needs no core any more; one that comes earlier by itself is left as it is."""
        cdef int64_t next_ns = fps_link_next_ns(&self.link)
        if 0 <= self.link.scheduled_ns <= next_ns:
            return 0
        self.link.scheduled_ns = next_ns
        return fps_queue_push(queue, next_ns, EVENT_CORES, 0)

    cdef int run(self, fps_queue *queue, int64_t now_ns) noexcept nogil:
        """The event: steps that have had their processor time. -1 when there is no memory."""
        cdef int32_t worker
        if now_ns != self.link.scheduled_ns:
            return 0  # replaced by an earlier one
        self.link.scheduled_ns = -1
        fps_link_advance(&self.link, now_ns)
        while True:
            worker = fps_link_ended(&self.link)
            if worker < 0:
                break
            if fps_queue_push(queue, now_ns + self.blocked_ns[worker], EVENT_COMPUTED, worker) < 0:
                return -1
        return self._schedule(queue) if self.link.progress.length else 0

    def busy_ns(self):
        """Time in which any worker wanted a core, in ns."""
        return self.link.busy_ns
