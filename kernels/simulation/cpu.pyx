"""A round-robin CPU model: N workers share C cores through one run queue, with a time slice.

A worker that finds no idle core enters the run queue. Of workers that enter at the same time, the one that has been without a
core for longest goes first, so that a worker queues behind those it wakes. After a slice a worker goes to the end of the queue
if any worker is in it; otherwise it keeps its core. Three equal steps that begin together on two cores therefore do not end
together after 1.5 times their time, the mean of a fair scheduler: short steps end after one, one, and two times their time. A
fraction of a core slows all cores: 1.5 cores are two cores at three quarters of the speed.

Time that a step then waits without a core (sleep, files) does not depend on other workers. The model leaves out the cost of a
context switch, and the run queue per core and load balancing of real machines.
"""

from libc.math cimport ceil
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free

from fastps.kernels.simulation.event_queue cimport EVENT_COMPUTED, EVENT_CORES, queue_add


cdef class Cores:
    """`count` cores, possibly a fraction, for `workers` workers, and the slice in ns; 0 cores: one for each worker.

    Raises ValueError for a number out of range, and MemoryError.
    """

    def __cinit__(self, double count, int64_t workers, int64_t slice_ns):
        cdef int64_t core
        if not 0 <= count <= 1e6 or workers < 1 or slice_ns < 1:
            raise ValueError(
                f"expected 0 (one a worker) to 1e6 cores for at least 1 worker, in slices of 1 ns or more, found {count} cores"
                f" for {workers} workers, slices of {slice_ns} ns")
        self.slice_ns, self.shared = slice_ns, 0 < count < workers
        self.n_cores = <int64_t> ceil(count) if self.shared else 0
        self.speed = count / self.n_cores if self.shared else 1.0
        self.first = self.last = -1
        self.handing_out_ns = -1
        self.workers = <working_t *> calloc(workers, sizeof(working_t))
        self.cores = <core_t *> calloc(self.n_cores + 1, sizeof(core_t))
        if not self.workers or not self.cores:
            raise MemoryError()
        for core in range(self.n_cores):
            self.cores[core].worker = -1

    def __dealloc__(self):
        free(self.workers)
        free(self.cores)

    cdef void begin(self, queue_t *queue, int32_t worker, int64_t cpu_ns, int64_t blocked_ns) noexcept nogil:
        """Begin a worker's step; EVENT_COMPUTED follows when it ends."""
        if not self.shared or cpu_ns < 1:
            queue_add(queue, queue.now_ns + cpu_ns + blocked_ns, EVENT_COMPUTED, worker)
            return
        self.workers[worker].blocked_ns = blocked_ns
        self.workers[worker].left_ns = <int64_t> ceil(<double> cpu_ns / self.speed)
        self._enter(worker, queue.now_ns)
        if self.handing_out_ns != queue.now_ns:
            self.handing_out_ns = queue.now_ns  # assign cores once every worker of this instant is in the queue
            queue_add(queue, queue.now_ns, EVENT_CORES, <int32_t> self.n_cores)

    cdef void _enter(self, int32_t worker, int64_t now_ns) noexcept nogil:
        """Enter the run queue behind earlier workers; within one instant, behind workers that released a core earlier."""
        cdef working_t *entering = &self.workers[worker]
        cdef int32_t before = self.last
        entering.came_ns = now_ns
        while before >= 0 and self.workers[before].came_ns == now_ns and self.workers[before].done_ns > entering.done_ns:
            before = self.workers[before].previous
        entering.previous = before
        entering.next = self.first if before < 0 else self.workers[before].next
        if entering.next < 0:
            self.last = worker
        else:
            self.workers[entering.next].previous = worker
        if before < 0:
            self.first = worker
        else:
            self.workers[before].next = worker

    cdef void _hand_out(self, queue_t *queue, int32_t core) noexcept nogil:
        """Assign an idle core to the first worker of the run queue, if there is one."""
        cdef int32_t worker = self.first
        self.cores[core].worker = worker
        if worker < 0:
            return
        self.first = self.workers[worker].next
        if self.first < 0:
            self.last = -1
        else:
            self.workers[self.first].previous = -1
        self.cores[core].began_ns = queue.now_ns
        self.cores[core].ends_ns = queue.now_ns + self.workers[worker].left_ns
        self.cores[core].scheduled_ns = -1
        self._schedule(queue, core)

    cdef void _schedule(self, queue_t *queue, int32_t core) noexcept nogil:
        """Schedule the core's event: the end of its step, or of its slice if a worker waits."""
        cdef core_t *at = &self.cores[core]
        cdef int64_t next_ns = at.ends_ns
        if self.first >= 0:
            next_ns = min(next_ns, max(queue.now_ns, at.began_ns + self.slice_ns))
        if at.scheduled_ns != next_ns:
            at.scheduled_ns = next_ns
            queue_add(queue, next_ns, EVENT_CORES, core)

    cdef void run(self, queue_t *queue, int32_t core) noexcept nogil:
        """Handle an event: a step or slice ended, or workers entered the queue."""
        cdef core_t *at = &self.cores[core]
        cdef int32_t worker = at.worker
        if core == self.n_cores:
            self._hand_out_all(queue)
            return
        if worker < 0 or queue.now_ns != at.scheduled_ns:
            return  # void: an earlier event replaced it
        self.workers[worker].done_ns = queue.now_ns
        if queue.now_ns < at.ends_ns:
            self.workers[worker].left_ns = at.ends_ns - queue.now_ns
            self._enter(worker, queue.now_ns)
        else:
            self.workers[worker].done_ns += self.workers[worker].blocked_ns
            queue_add(queue, self.workers[worker].done_ns, EVENT_COMPUTED, worker)
        self._hand_out(queue, core)

    cdef void _hand_out_all(self, queue_t *queue) noexcept nogil:
        """Assign idle cores to the first workers of the queue; while any worker is left, slices end from now on."""
        cdef int32_t core
        self.handing_out_ns = -1
        for core in range(<int32_t> self.n_cores):
            if self.first < 0:
                return
            if self.cores[core].worker < 0:
                self._hand_out(queue, core)
        for core in range(<int32_t> self.n_cores):
            if self.first >= 0:
                self._schedule(queue, core)
