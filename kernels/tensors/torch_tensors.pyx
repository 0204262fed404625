# distutils: language = c++
"""A step's work on every tensor of a model, in compiled loops over torch's own C++ tensors.

The loops over Python's attributes have the same effect. These replace them if torch is the very version that this module was
built against. No other compiled module depends on torch.
"""

import threading
import weakref

from libc.stdint cimport int64_t
from libcpp.vector cimport vector

from torch.autograd.graph import increment_version

cdef extern from "tensors/torch_tensors.hpp":
    const char *TORCH_VERSION
    cppclass fps_value:
        fps_value()
        fps_value(object tensor) except +
        const void *place

    cppclass fps_parameter:
        bint borrows
        const void *place
        bint counts
        int64_t version
        void drop()

    bint fps_take(object tensor, const fps_value &value) except +
    bint fps_settle(object tensor, object values, fps_parameter &known, const fps_value &value) except +
    const void *fps_place(object tensor) except +
    void fps_note_form(object tensor, fps_parameter &known) except +
    bint fps_has_form(object tensor, const fps_parameter &known) except +
    bint fps_count_write(object tensor, bint of_its_own) except +
    bint fps_move_along(object tensor, fps_parameter &known) except +
    bint fps_version(object tensor, int64_t *version) except +
    bint fps_grad_is(object tensor, const fps_value &value, bint *same) except +
    Py_ssize_t fps_point_all(object tensors, vector[fps_parameter] &known, const vector[fps_value] &values, bint is_write,
                             vector[Py_ssize_t] &uncounted, Py_ssize_t i) except +
    Py_ssize_t fps_next_changed(object tensors, const vector[fps_parameter] &known, Py_ssize_t i) except +
    Py_ssize_t fps_next_other_grad(object tensors, const vector[fps_value] &known, Py_ssize_t i) except +
    Py_ssize_t fps_set_grads(object tensors, object gradients, const vector[fps_value] &known, Py_ssize_t i) except +
    Py_ssize_t fps_drop_grads(object tensors, Py_ssize_t i) except +
    bint fps_has_new_grad(object tensor) except +
    bint fps_is_held(object tensors, const vector[fps_value] &known, Py_ssize_t i) except +
    Py_ssize_t fps_next_held(object tensors, const vector[fps_value] &known, Py_ssize_t i) except +
    object fps_part(object tensors, Py_ssize_t i) except +
    void fps_set_counts() except +

BUILT_FOR = TORCH_VERSION.decode()  # without torch's suffix for a kind of build: "2.13.0", not "2.13.0+cpu"


fps_set_counts()

cdef object _all = weakref.WeakSet()  # of the loops: views of one tensor have one version counter, also in two optimizers


cdef class _Section:
    """The code in which versions are remembered: one thread at a time, because a version read in Python lets others run."""

    cdef object lock
    cdef int inside

    def __cinit__(self):
        self.lock = threading.RLock()

    def __enter__(self):
        self.lock.acquire()
        self.inside += 1

    def __exit__(self, *_):
        self.inside -= 1
        self.lock.release()


cdef _Section _counting = _Section()


cdef const void *_place(object tensor) except? NULL:
    """Where a tensor's first element lies; NULL if that is nowhere."""
    cdef const void *place = fps_place(tensor)
    if place == NULL:  # of a subclass, say
        place = <const void *> <size_t> tensor.data_ptr()
    return place


cdef class Values:
    """A loop's values, one for each tensor, with facts about each. Made by `CompiledLoops.prepare`."""

    cdef list tensors
    cdef object memory
    cdef vector[fps_value] known
    cdef bint is_lent  # one of them was given away since `own_all`

    def __cinit__(self, list tensors not None, memory):
        self.tensors = tensors  # this very list: `own` replaces its elements
        self.memory = memory
        self.is_lent = True
        for tensor in tensors:
            self.known.push_back(fps_value(tensor))

    def take(self, list tensors not None):
        """Copy the bytes of these tensors, one for each value. Returns whether all were in memory, of their value's form.

        Else the first ones may have been copied.
        """
        cdef size_t index
        if len(tensors) != <Py_ssize_t> self.known.size():
            raise ValueError(f"expected {self.known.size()} tensors, found {len(tensors)}")
        for index in range(self.known.size()):
            if not fps_take(tensors[index], self.known[index]):
                return False
        return True


cdef class CompiledLoops:
    """Loops over the parameters `tensors`, a list that must not change; see fastps.torch.tensor_loops.TensorLoops.

    uncounted: the indices of those that only a move changes, and no write.

    >>> import torch
    >>> parameter = torch.nn.Parameter(torch.zeros(2))
    >>> loops = CompiledLoops([parameter])
    >>> loops.show(loops.prepare([torch.ones(2)]))
    >>> parameter.data
    tensor([1., 1.])
    """

    can_own = True

    cdef object __weakref__
    cdef list tensors
    cdef vector[fps_parameter] known
    cdef object memory  # which the parameters' own storages point into

    def __init__(self, list tensors not None, uncounted=frozenset()):
        self.tensors = tensors
        self.known.resize(len(tensors))
        for index in uncounted:
            self.known[index].counts = False
        with _counting:
            self.remember()
            _all.add(self)

    def prepare(self, list values not None, memory=None):
        """Return these tensors, one for each parameter, in the form that the loops take. `memory`: they are views of it."""
        if len(values) != len(self.tensors):
            raise ValueError(f"expected {len(self.tensors)} tensors, found {len(values)}")
        return Values(values, memory)

    cdef int _check(self, Values values) except -1:
        if values.known.size() != self.known.size():
            raise ValueError(f"expected {self.known.size()} tensors, found {values.known.size()}")
        return 0

    def show(self, Values values not None, bint is_write=False):
        """Set `data` of each tensor to its value's: no copy. With `is_write` autograd knows, as by `count_writes` of all."""
        cdef Py_ssize_t i = -1  # the last one that was tried
        cdef vector[Py_ssize_t] uncounted
        self._check(values)
        if values.memory is None or values.memory is not self.memory:
            self._drop_storages()
            self.memory = values.memory
        if not _counting.inside:
            i = fps_point_all(self.tensors, self.known, values.known, is_write, uncounted, 0)  # which lets no other thread run
            if i == len(self.tensors) and uncounted.empty():
                return
        with _counting:
            while i < len(self.tensors):
                if i >= 0:
                    self._settle(values, i)
                    if is_write:
                        uncounted.push_back(i)
                i = fps_point_all(self.tensors, self.known, values.known, is_write, uncounted, i + 1)
            if not uncounted.empty():
                self.count_writes([self.tensors[i] for i in uncounted])

    cdef int _settle(self, Values values, Py_ssize_t i) except -1:
        """Point one tensor that is not plain at its value."""
        self.known[i].place = values.known[i].place
        if not fps_settle(self.tensors[i], values.tensors[i], self.known[i], values.known[i]):
            self.tensors[i].data = values.tensors[i]
            self.known[i].borrows = True
            self.known[i].place = _place(self.tensors[i])
        fps_note_form(self.tensors[i], self.known[i])
        return 0

    def show_copies(self):
        """Give each tensor a private copy of its values. What shares its owned storage goes along."""
        cdef Py_ssize_t i
        for i in range(len(self.tensors)):
            if not fps_move_along(self.tensors[i], self.known[i]):
                self.tensors[i].data = self.tensors[i].data.clone()

    def count_writes(self, list written not None):
        """Let autograd know that these tensors have new values, as a write would. No loops' `changed` sees it."""
        cdef CompiledLoops loops
        cdef list present
        with _counting:
            present = list(_all)
            for loops in present:
                loops._count_versions(-1)
            for each in written:
                if not fps_count_write(each, False):
                    increment_version(each)
            for loops in present:
                loops._count_versions(1)

    cdef int _count_versions(self, int64_t times) except -1:
        """Add the tensors' present versions to the remembered ones, so many times."""
        cdef Py_ssize_t i
        for i in range(len(self.tensors)):
            self.known[i].version += times * self._version(i)
        return 0

    cdef void _drop_storages(self):
        """Drop all storages, because each keeps only the memory mapped in which it was made."""
        cdef size_t i
        for i in range(self.known.size()):
            self.known[i].drop()

    cdef int64_t _version(self, Py_ssize_t i) except -1:
        cdef int64_t version = 0
        if not fps_version(self.tensors[i], &version):
            version = self.tensors[i]._version
        return version

    def remember(self):
        """Start detecting changes: writes and pointer moves up to now do not count."""
        cdef Py_ssize_t i
        with _counting:
            for i in range(len(self.tensors)):
                self.known[i].version = self._version(i)
                self.known[i].place = _place(self.tensors[i])
                fps_note_form(self.tensors[i], self.known[i])

    def changed(self):
        """Return the index of the first tensor written to or pointed elsewhere since `remember`, except by `show`, or -1."""
        cdef Py_ssize_t i = -1
        while (i := fps_next_changed(self.tensors, self.known, i + 1)) < len(self.tensors):
            with _counting:  # another thread may have been in `count_writes`
                if self.has_moved(i) or (self.known[i].counts and self._version(i) != self.known[i].version):
                    return i
        return -1

    def has_moved(self, Py_ssize_t index):
        """Return whether a tensor was pointed at other memory, or at it in another form, since `remember`, except by `show`."""
        tensor = self.tensors[index]
        return _place(tensor) != self.known[index].place or not fps_has_form(tensor, self.known[index])

    def set_gradients(self, Values gradients not None):
        """Set `grad` of each tensor to its gradient."""
        cdef Py_ssize_t i = -1
        self._check(gradients)
        gradients.is_lent = True
        while (i := fps_set_grads(self.tensors, gradients.tensors, gradients.known, i + 1)) < len(self.tensors):
            self.tensors[i].grad = gradients.tensors[i]

    def drop_gradients(self):
        """Set `grad` of each tensor to None."""
        cdef Py_ssize_t i = -1
        while (i := fps_drop_grads(self.tensors, i + 1)) < len(self.tensors):
            self.tensors[i].grad = None

    def other_gradient(self, Values gradients not None):
        """Return the index of the first tensor whose `grad` is not the very object in `gradients`, or -1."""
        cdef Py_ssize_t i = -1
        cdef bint same = False
        self._check(gradients)
        while (i := fps_next_other_grad(self.tensors, gradients.known, i + 1)) < len(self.tensors):
            if not fps_grad_is(self.tensors[i], gradients.known[i], &same):
                same = self.tensors[i].grad is gradients.tensors[i]
            if not same:
                return i
        return -1

    def has_new_gradient(self, Py_ssize_t index):
        """Return whether a tensor has a `grad` that nobody else holds, nor its memory."""
        return fps_has_new_grad(self.tensors[index])

    def own(self, Values values not None, Py_ssize_t index):
        """Part a value from all others that hold it or its memory: they keep its numbers in a copy. Return the value."""
        self._check(values)
        if fps_is_held(values.tensors, values.known, index):
            self._part(values, index)
        values.is_lent = True
        return values.tensors[index]

    cdef object _part(self, Values values, Py_ssize_t index):
        """Part a value from all others, and return the tensor that they hold."""
        cdef const void *place = values.known[index].place  # of the memory, also if the tensor was pointed elsewhere
        held = fps_part(values.tensors, index)
        values.known[index] = fps_value(values.tensors[index])
        values.known[index].place = place
        return held

    def own_all(self, Values values not None):
        """Part all values from others that hold them, each `grad` of a tensor included. Return what they hold, by index."""
        cdef Py_ssize_t i = 0
        cdef dict held = {}
        self._check(values)
        if not values.is_lent:
            return held
        while (i := fps_next_held(values.tensors, values.known, i)) < len(values.tensors):
            held[i] = self._part(values, i)
            i += 1
        values.is_lent = False
        return held
