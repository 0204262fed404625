# distutils: language = c++
"""What a step does to every tensor of a model, in compiled loops over torch's own C++ tensors.

The same as kernels/tensors/attributes.pyx does by Python's attributes, and so to be chosen (fastps/torch/tensor_loops.py) where
torch is the very version that this was built against. The one module here that knows torch. Refuses to know why a step does it.
"""

from libc.stdint cimport int64_t
from libcpp.vector cimport vector

cdef extern from "tensors/torch_tensors.hpp":
    const char *TORCH_VERSION
    cppclass fps_value:
        fps_value()
        fps_value(object tensor) except +

    cppclass fps_home:
        pass

    bint fps_point(object tensor, fps_home &home, const fps_value &value) except +
    bint fps_settle(object tensor, object values, fps_home &home, const fps_value &value) except +
    const void *fps_storage(object tensor) except +
    bint fps_version(object tensor, int64_t *version) except +
    bint fps_grad_is(object tensor, const fps_value &value, bint *same) except +
    bint fps_set_grad(object tensor, object gradient) except +
    bint fps_drop_grad(object tensor) except +

BUILT_FOR = TORCH_VERSION.decode()  # without what torch adds for a kind of build: "2.13.0", not "2.13.0+cpu"


cdef class Values:
    """What a loop gives its tensors: a tensor for each, and what is to be known of it. Made by `CompiledLoops.prepare`."""

    cdef list tensors
    cdef object memory
    cdef vector[fps_value] known

    def __cinit__(self, list tensors not None, memory):
        self.tensors = tensors
        self.memory = memory
        for tensor in tensors:
            self.known.push_back(fps_value(tensor))


cdef class CompiledLoops:
    """Loops over the parameters `tensors`, a list that stays as it is; see fastps.torch.tensor_loops.TensorLoops.

    >>> import torch
    >>> parameter = torch.nn.Parameter(torch.zeros(2))
    >>> loops = CompiledLoops([parameter])
    >>> loops.show(loops.prepare([torch.ones(2)]))
    >>> parameter.data
    tensor([1., 1.])
    """

    cdef list tensors
    cdef vector[int64_t] remembered
    cdef vector[const void *] storages      # of each tensor, when it was shown or remembered last
    cdef vector[fps_home] homes
    cdef object memory              # that the homes point into

    def __init__(self, list tensors not None):
        self.tensors = tensors
        self.homes.resize(len(tensors))
        self.remember()

    def prepare(self, list values not None, memory=None):
        """These tensors, a value a tensor, as the other loops take them. `memory`: what all of them are views of."""
        if len(values) != len(self.tensors):
            raise ValueError(f"expected {len(self.tensors)} tensors, found {len(values)}")
        return Values(values, memory)

    cdef int _check(self, Values values) except -1:
        if values.known.size() != self.homes.size():
            raise ValueError(f"expected {self.homes.size()} tensors, found {values.known.size()}")
        return 0

    def show(self, Values values not None):
        """`data` of each tensor is that of its of `values`: no copy, and no write as the version counter counts them."""
        cdef Py_ssize_t i
        self._check(values)
        if values.memory is None or values.memory is not self.memory:
            self._leave_homes()
            self.memory = values.memory
        for i in range(len(self.tensors)):
            if fps_point(self.tensors[i], self.homes[i], values.known[i]):
                continue
            if not fps_settle(self.tensors[i], values.tensors[i], self.homes[i], values.known[i]):
                self.tensors[i].data = values.tensors[i]
            self.storages[i] = fps_storage(self.tensors[i])

    cdef void _leave_homes(self):
        """No home may be pointed elsewhere: each keeps the memory mapped that it was made in, and no other."""
        cdef size_t count = self.homes.size()
        self.homes.clear()
        self.homes.resize(count)

    cdef int64_t _version(self, Py_ssize_t i) except -1:
        cdef int64_t version = 0
        if not fps_version(self.tensors[i], &version):
            version = self.tensors[i]._version
        return version

    def remember(self):
        """What was written to the tensors up to now, and where they were pointed, is no change."""
        cdef Py_ssize_t i
        self.remembered.resize(len(self.tensors))
        self.storages.resize(len(self.tensors))
        for i in range(len(self.tensors)):
            self.remembered[i] = self._version(i)
            self.storages[i] = fps_storage(self.tensors[i])

    def changed(self):
        """The index of the first tensor that was written to or pointed elsewhere since `remember`, or -1; `show` is neither."""
        cdef Py_ssize_t i
        for i in range(len(self.tensors)):
            if self._version(i) != self.remembered[i] or fps_storage(self.tensors[i]) != self.storages[i]:
                return i
        return -1

    def has_moved(self, Py_ssize_t index):
        """Whether a tensor was pointed at other memory since `remember`, and not by `show`."""
        return fps_storage(self.tensors[index]) != self.storages[index]

    def set_gradients(self, Values gradients not None):
        """`grad` of each tensor is its of `gradients`."""
        cdef Py_ssize_t i
        self._check(gradients)
        for i in range(len(self.tensors)):
            if not fps_set_grad(self.tensors[i], gradients.tensors[i]):
                self.tensors[i].grad = gradients.tensors[i]

    def drop_gradients(self):
        """`grad` of each tensor is None."""
        cdef Py_ssize_t i
        for i in range(len(self.tensors)):
            if not fps_drop_grad(self.tensors[i]):
                self.tensors[i].grad = None

    def other_gradient(self, Values gradients not None):
        """The index of the first tensor whose `grad` is not the very one of `gradients`, or -1."""
        cdef Py_ssize_t i
        cdef bint same = False
        self._check(gradients)
        for i in range(len(self.tensors)):
            if not fps_grad_is(self.tensors[i], gradients.known[i], &same):
                same = self.tensors[i].grad is gradients.tensors[i]
            if not same:
                return i
        return -1
