/* What a step does to one tensor, through torch's own C++ tensors: a few loads and stores in place of Python's attributes.
 *
 * Each function has the effect of the attribute that it names, and returns false, with nothing done, for a tensor that is not of
 * the plain kind (a subclass, another shape, dtype or device): then the attribute itself is asked. What it refuses to be:
 * independent of torch's version. Its headers are those of one, which TORCH_VERSION names. */

#pragma once

#include <torch/csrc/api/include/torch/version.h>
#include <torch/csrc/autograd/python_variable.h>

/* The implementation of a Python object's tensor, or null where its type has ways of its own. */
static inline c10::TensorImpl *fps_impl(PyObject *object) {
    return THPVariable_CheckExact(object) ? THPVariable_Unpack(object).unsafeGetTensorImpl() : nullptr;
}

/* The same, of strided memory. */
static inline c10::TensorImpl *fps_plain(PyObject *object) {
    c10::TensorImpl *impl = fps_impl(object);
    return impl && impl->unsafe_storage() && impl->layout() == at::kStrided ? impl : nullptr;
}

/* For the few numbers of a shape, faster than a call of memcmp. */
static inline bool fps_equal(at::IntArrayRef one, at::IntArrayRef other) {
    if (one.size() != other.size()) return false;
    for (size_t i = 0; i < one.size(); i++)
        if (one[i] != other[i]) return false;
    return true;
}

static inline bool fps_alike(const c10::TensorImpl *one, const c10::TensorImpl *other) {
    return fps_equal(one->sizes(), other->sizes()) && one->dtype() == other->dtype() && one->device() == other->device();
}

/* tensor.data = values: the same shape and strides over other memory. The version counter stays as it is. */
static inline bool fps_show(PyObject *tensor, PyObject *values) {
    c10::TensorImpl *shown = fps_plain(tensor), *from = fps_plain(values);
    if (!shown || !from || !fps_alike(shown, from)) return false;
    if (!shown->allow_tensor_metadata_change() || shown->key_set() != from->key_set() ||
        !fps_equal(shown->strides(), from->strides()) || shown->storage_offset() != from->storage_offset())
        return false;
    shown->set_storage_keep_dtype(from->storage());
    return true;
}

/* tensor._version, of a tensor that counts. */
static inline bool fps_version(PyObject *tensor, int64_t *version) {
    c10::TensorImpl *impl = fps_impl(tensor);
    if (!impl || !impl->version_counter().enabled()) return false;
    *version = impl->version_counter().current_version();
    return true;
}

/* tensor.grad is gradient. */
static inline bool fps_grad_is(PyObject *tensor, PyObject *gradient, int *same) {
    c10::TensorImpl *impl = fps_impl(tensor), *other = fps_impl(gradient);
    if (!impl || !other) return false;
    *same = static_cast<const c10::TensorImpl *>(impl)->grad().unsafeGetTensorImpl() == other;
    return true;
}

/* tensor.grad = gradient. */
static inline bool fps_set_grad(PyObject *tensor, PyObject *gradient) {
    c10::TensorImpl *impl = fps_plain(tensor), *given = fps_plain(gradient);
    if (!impl || !given || impl == given || !fps_alike(impl, given)) return false;
    impl->mutable_grad() = THPVariable_Unpack(gradient);
    return true;
}

/* tensor.grad = None. */
static inline bool fps_drop_grad(PyObject *tensor) {
    c10::TensorImpl *impl = fps_plain(tensor);
    if (!impl) return false;
    if (static_cast<const c10::TensorImpl *>(impl)->grad().defined()) impl->mutable_grad().reset();
    return true;
}
