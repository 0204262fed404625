# distutils: language = c++
"""What a step does to every tensor of a model, in compiled loops over torch's own C++ tensors.

The same as kernels/attributes.pyx does by Python's attributes, and so to be chosen (fastps/tensor_loops.py) where torch is the
very version that this was built against. The one module here that knows torch. Refuses to know why a step does it.
"""

from libc.stdint cimport int64_t
from libcpp.vector cimport vector

cdef extern from "torch_tensors.hpp":
    const char *TORCH_VERSION
    bint fps_show(object tensor, object values) except +
    bint fps_version(object tensor, int64_t *version) except +
    bint fps_grad_is(object tensor, object gradient, bint *same) except +
    bint fps_set_grad(object tensor, object gradient) except +
    bint fps_drop_grad(object tensor) except +

BUILT_FOR = TORCH_VERSION.decode()  # without what torch adds for a kind of build: "2.13.0", not "2.13.0+cpu"


cdef class CompiledLoops:
    """Loops over the parameters `tensors`, a list that stays as it is; see fastps.tensor_loops.TensorLoops.

    >>> import torch
    >>> parameter = torch.nn.Parameter(torch.zeros(2))
    >>> CompiledLoops([parameter]).show([torch.ones(2)])
    >>> parameter.data
    tensor([1., 1.])
    """

    cdef list tensors
    cdef vector[int64_t] remembered

    def __init__(self, list tensors not None):
        self.tensors = tensors
        self.remember()

    cdef Py_ssize_t _count(self, list values) except -1:
        if len(values) != len(self.tensors):
            raise ValueError(f"expected {len(self.tensors)} tensors, found {len(values)}")
        return len(values)

    def show(self, list values not None):
        """`data` of each tensor is that of its of `values`: no copy, and no write as the version counter counts them."""
        cdef Py_ssize_t i
        for i in range(self._count(values)):
            if not fps_show(self.tensors[i], values[i]):
                self.tensors[i].data = values[i]

    cdef int64_t _version(self, Py_ssize_t i) except -1:
        cdef int64_t version = 0
        if not fps_version(self.tensors[i], &version):
            version = self.tensors[i]._version
        return version

    def remember(self):
        """What was written to the tensors up to now is no change."""
        cdef Py_ssize_t i
        self.remembered.resize(len(self.tensors))
        for i in range(len(self.tensors)):
            self.remembered[i] = self._version(i)

    def changed(self):
        """The index of the first tensor that was written to since `remember`, or -1."""
        cdef Py_ssize_t i
        for i in range(len(self.tensors)):
            if self._version(i) != self.remembered[i]:
                return i
        return -1

    def set_gradients(self, list gradients not None):
        """`grad` of each tensor is its of `gradients`."""
        cdef Py_ssize_t i
        for i in range(self._count(gradients)):
            if not fps_set_grad(self.tensors[i], gradients[i]):
                self.tensors[i].grad = gradients[i]

    def drop_gradients(self):
        """`grad` of each tensor is None."""
        cdef Py_ssize_t i
        for i in range(len(self.tensors)):
            if not fps_drop_grad(self.tensors[i]):
                self.tensors[i].grad = None

    def other_gradient(self, list gradients not None):
        """The index of the first tensor whose `grad` is not the very one of `gradients`, or -1."""
        cdef Py_ssize_t i
        cdef bint same = False
        for i in range(self._count(gradients)):
            if not fps_grad_is(self.tensors[i], gradients[i], &same):
                same = self.tensors[i].grad is gradients[i]
            if not same:
                return i
        return -1
