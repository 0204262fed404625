/* A step's work on one tensor through torch's own C++ tensors: a few loads and stores in place of Python's attributes.
 *
 * Each function has the effect of the attribute that its comment names. For a tensor that is not plain (a subclass, another
 * shape, dtype or device) it does nothing and returns false, and the caller uses the attribute. The code depends on torch's
 * version: it is built with the headers of one, which TORCH_VERSION names. */

#pragma once

#include <memory>
#include <vector>

#include <torch/csrc/api/include/torch/version.h>
#include <torch/csrc/autograd/python_variable.h>

/* The implementation of a Python object's tensor, or null if its type is a subclass. */
static inline c10::TensorImpl *fps_impl(PyObject *object) {
    return THPVariable_CheckExact(object) ? THPVariable_Unpack(object).unsafeGetTensorImpl() : nullptr;
}

/* The same for a tensor with strided storage, or null. */
static inline c10::TensorImpl *fps_plain(PyObject *object) {
    c10::TensorImpl *impl = fps_impl(object);
    return impl && impl->unsafe_storage() && impl->layout() == at::kStrided ? impl : nullptr;
}

/* Faster than memcmp for the few numbers of a shape. */
static inline bool fps_equal(at::IntArrayRef one, at::IntArrayRef other) {
    if (one.size() != other.size()) return false;
    for (size_t i = 0; i < one.size(); i++)
        if (one[i] != other[i]) return false;
    return true;
}

static inline bool fps_alike(const c10::TensorImpl *one, const c10::TensorImpl *other) {
    return fps_equal(one->sizes(), other->sizes()) && one->dtype() == other->dtype() && one->device() == other->device();
}

/* Facts about one of a loop's values, gathered once. */
struct fps_value {
    c10::TensorImpl *impl = nullptr;  /* null: not plain; only the attribute works */
    void *data = nullptr;             /* where its storage begins; null: only the attribute can assign it */
    size_t nbytes = 0;
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    at::DimVector form;               /* sizes, then strides */

    fps_value() = default;
    explicit fps_value(PyObject *object) : impl(fps_impl(object)) {
        if (!fps_plain(object) || impl->storage_offset() || !impl->device().is_cpu()) return;
        c10::StorageImpl *storage = impl->unsafe_storage().unsafeGetStorageImpl();
        data = storage->mutable_data();
        nbytes = storage->nbytes();
        dtype = c10::typeMetaToScalarType(impl->dtype());
        form.append(impl->sizes().begin(), impl->sizes().end());
        form.append(impl->strides().begin(), impl->strides().end());
    }

    bool has_form_of(const c10::TensorImpl *other) const {
        size_t dimensions = form.size() / 2;
        return fps_equal(other->sizes(), {form.data(), dimensions}) && !other->storage_offset() &&
               fps_equal(other->strides(), {form.data() + dimensions, dimensions}) && other->dtype() == dtype;
    }
};

/* One tensor's own storage, whose data pointer moves from value to value. */
struct fps_owned_storage {
    c10::Storage storage;  /* null: none yet */
    void *data = nullptr;  /* the data pointer set last */
};

/* Deleter of an owned storage's data pointer. Its context is a storage that keeps the memory of all values mapped. */
static void fps_let_go(void *kept) { delete static_cast<c10::Storage *>(kept); }

/* tensor.data = value, for a tensor in its owned storage: one pointer is written, and every tensor that shares the storage
 * follows. */
static inline bool fps_point(PyObject *tensor, fps_owned_storage &owned, const fps_value &value) {
    c10::TensorImpl *impl = fps_impl(tensor);
    if (!impl || !owned.storage || !value.data) return false;
    c10::StorageImpl *storage = impl->unsafe_storage().unsafeGetStorageImpl();
    if (storage != owned.storage.unsafeGetStorageImpl() || !value.has_form_of(impl)) return false;
    at::DataPtr &own = storage->_mutable_data_ptr_no_checks();
    if (own.get() != owned.data || own.get_deleter() != fps_let_go || storage->nbytes() != value.nbytes) return false;
    own = at::DataPtr(value.data, own.release_context(), fps_let_go, own.device());
    owned.data = value.data;
    return true;
}

/* tensor.data = values: the same shape and strides over other memory, in a new owned storage if that memory is the CPU's. The version
 * counter stays unchanged. */
static inline bool fps_settle(PyObject *tensor, PyObject *values, fps_owned_storage &owned, const fps_value &value) {
    owned = fps_owned_storage();
    c10::TensorImpl *shown = fps_plain(tensor), *from = fps_plain(values);
    if (!shown || !from || !fps_alike(shown, from)) return false;
    if (!shown->allow_tensor_metadata_change() || shown->key_set() != from->key_set() ||
        !fps_equal(shown->strides(), from->strides()) || shown->storage_offset() != from->storage_offset())
        return false;
    const c10::Storage &memory = from->unsafe_storage();
    if (!value.data) {
        shown->set_storage_keep_dtype(memory);
        return true;
    }
    at::DataPtr own(value.data, new c10::Storage(memory), fps_let_go, memory.device());
    owned.storage = c10::Storage(c10::Storage::use_byte_size_t(), value.nbytes, std::move(own), nullptr, false);
    owned.data = value.data;
    shown->set_storage_keep_dtype(owned.storage);
    return true;
}

/* tensor._version, for a tensor with a version counter. */
static inline bool fps_version(PyObject *tensor, int64_t *version) {
    c10::TensorImpl *impl = fps_impl(tensor);
    if (!impl || !impl->version_counter().enabled()) return false;
    *version = impl->version_counter().current_version();
    return true;
}

/* A tensor's storage; null: not plain. */
static inline const void *fps_storage(PyObject *tensor) {
    c10::TensorImpl *impl = fps_plain(tensor);
    return impl ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

/* tensor.grad is value. */
static inline bool fps_grad_is(PyObject *tensor, const fps_value &value, int *same) {
    c10::TensorImpl *impl = fps_impl(tensor);
    if (!impl || !value.impl) return false;
    *same = static_cast<const c10::TensorImpl *>(impl)->grad().unsafeGetTensorImpl() == value.impl;
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

/* Whether tensor.grad is a tensor that nobody else holds, nor its memory. */
static inline bool fps_has_new_grad(PyObject *tensor) {
    const c10::TensorImpl *impl = fps_plain(tensor);
    if (!impl || !impl->grad().defined()) return false;
    const at::Tensor &grad = impl->grad();
    return grad.use_count() == 1 && (!grad.unsafeGetTensorImpl()->unsafe_storage() || grad.storage().use_count() == 1);
}

/* Whether anybody but this list holds its i-th tensor, or the tensor's memory through another tensor (a view, detach()). */
static inline bool fps_is_held(PyObject *list, const std::vector<fps_value> &known, Py_ssize_t i) {
    c10::TensorImpl *impl = known[i].data ? known[i].impl : fps_plain(PyList_GET_ITEM(list, i));
    return impl && (Py_REFCNT(PyList_GET_ITEM(list, i)) > 1 || c10::raw::intrusive_ptr::use_count(impl) > 1 ||
                    impl->unsafe_storage().use_count() > 1);
}

/* The first such index from `i` on; the list's length: none. */
static inline Py_ssize_t fps_next_held(PyObject *list, const std::vector<fps_value> &known, Py_ssize_t i) {
    while (i < PyList_GET_SIZE(list) && !fps_is_held(list, known, i)) i++;
    return i;
}

using fps_mapping = std::shared_ptr<at::DataPtr>;
static void fps_unmap(void *mapping) { delete static_cast<fps_mapping *>(mapping); }

/* What tensors keep that were parted from mapped memory: their copy, and the mapping, in which a NumPy array may still look. */
struct fps_parted {
    at::DataPtr copy;
    fps_mapping mapping;
};
static void fps_free_parted(void *parted) { delete static_cast<fps_parted *>(parted); }

/* Move all tensors that share the storage of the list's i-th tensor to a copy of their values, and put a new tensor over the memory
 * into the list. */
static inline void fps_part(PyObject *list, Py_ssize_t i) {
    c10::InferenceMode inference(false);
    at::NoGradGuard no_grad;
    at::Tensor old = THPVariable_Unpack(PyList_GET_ITEM(list, i));
    c10::StorageImpl *storage = old.storage().unsafeGetStorageImpl();
    int64_t count = storage->nbytes() / old.element_size();
    at::Tensor copy = at::empty({0}, old.options()).set_(old.storage(), 0, {count}, {1}).clone();
    void *data = storage->mutable_data(), *copied = copy.storage().mutable_data();
    at::DataPtr memory = storage->set_data_ptr(at::DataPtr(nullptr, old.device()));
    fps_mapping mapping = memory.get_deleter() == fps_unmap ? *static_cast<fps_mapping *>(memory.get_context())
                                                            : std::make_shared<at::DataPtr>(std::move(memory));
    auto *parted = new fps_parted{copy.storage().unsafeGetStorageImpl()->set_data_ptr(at::DataPtr(nullptr, old.device())), mapping};
    storage->set_data_ptr(at::DataPtr(copied, parted, fps_free_parted, old.device()));
    at::DataPtr shared(data, new fps_mapping(mapping), fps_unmap, old.device());
    c10::Storage fresh(c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(shared), nullptr, false);
    at::Tensor made = at::empty({0}, old.options()).set_(fresh, old.storage_offset(), old.sizes(), old.strides());
    PyList_SetItem(list, i, THPVariable_Wrap(made));
}
