/* What a step does to one tensor, through torch's own C++ tensors: a few loads and stores in place of Python's attributes.
 *
 * Each function has the effect of the attribute that it names, and returns false, with nothing done, for a tensor that is not of
 * the plain kind (a subclass, another shape, dtype or device): then the attribute itself is asked. What it refuses to be:
 * independent of torch's version. Its headers are those of one, which TORCH_VERSION names. */

#pragma once

#include <torch/csrc/api/include/torch/version.h>
#include <torch/csrc/autograd/python_variable.h>

/* The tensor of a Python object, or null where its type has ways of its own. */
static inline const at::Tensor *fps_plain(PyObject *object) {
    if (!THPVariable_CheckExact(object)) return nullptr;
    const at::Tensor &tensor = THPVariable_Unpack(object);
    return tensor.defined() && tensor.has_storage() && tensor.layout() == at::kStrided ? &tensor : nullptr;
}

static inline bool fps_alike(const at::Tensor &one, const at::Tensor &other) {
    return one.sizes() == other.sizes() && one.dtype() == other.dtype() && one.device() == other.device();
}

/* tensor.data = values: the same shape and strides over other memory. The version counter stays as it is. */
static inline bool fps_show(PyObject *tensor, PyObject *values) {
    const at::Tensor *shown = fps_plain(tensor), *from = fps_plain(values);
    if (!shown || !from || !fps_alike(*shown, *from)) return false;
    c10::TensorImpl *impl = shown->unsafeGetTensorImpl();
    if (!impl->allow_tensor_metadata_change() || impl->key_set() != from->key_set() ||
        impl->strides() != from->strides() || impl->storage_offset() != from->storage_offset())
        return false;
    impl->set_storage_keep_dtype(from->storage());
    return true;
}

/* tensor._version, of a tensor that counts. */
static inline bool fps_version(PyObject *tensor, int64_t *version) {
    const at::Tensor *plain = fps_plain(tensor);
    if (!plain || plain->is_inference()) return false;
    *version = plain->_version();
    return true;
}

/* tensor.grad is gradient. */
static inline bool fps_grad_is(PyObject *tensor, PyObject *gradient, int *same) {
    const at::Tensor *plain = fps_plain(tensor);
    if (!plain || !THPVariable_CheckExact(gradient)) return false;
    *same = plain->grad().is_same(THPVariable_Unpack(gradient));
    return true;
}

/* tensor.grad = gradient. */
static inline bool fps_set_grad(PyObject *tensor, PyObject *gradient) {
    const at::Tensor *plain = fps_plain(tensor), *given = fps_plain(gradient);
    if (!plain || !given || tensor == gradient || !fps_alike(*plain, *given)) return false;
    plain->mutable_grad() = *given;
    return true;
}

/* tensor.grad = None. */
static inline bool fps_drop_grad(PyObject *tensor) {
    const at::Tensor *plain = fps_plain(tensor);
    if (!plain) return false;
    if (plain->grad().defined()) plain->mutable_grad().reset();
    return true;
}
