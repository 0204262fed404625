/* A step's work on one tensor through torch's own C++ tensors: a few loads and stores in place of Python's attributes.
 *
 * Each function has the effect of the attribute that its comment names. For a tensor that is not plain (a subclass, another
 * shape, dtype or device) it does nothing and returns false, and the caller uses the attribute. The code depends on torch's
 * version: it is built with the headers of one, which TORCH_VERSION names. */

#pragma once

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/Storage.h>
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

/* Where a storage's memory lies; data() would ask first whether a compiler only pretends that it has some. */
static inline at::DataPtr &fps_data(c10::StorageImpl *storage) { return storage->_mutable_data_ptr_no_checks(); }

/* Where the first element of a tensor with a storage lies. */
static inline const void *fps_begin(const c10::TensorImpl *impl) {
    const char *data = static_cast<const char *>(fps_data(impl->unsafe_storage().unsafeGetStorageImpl()).get());
    const int64_t offset = impl->storage_offset();
    return offset ? data + offset * impl->itemsize() : data;  /* itemsize() is slow, and most have no offset */
}

/* The same; null: not a tensor with a storage. */
static inline const void *fps_place(const c10::TensorImpl *impl) {
    return impl && impl->unsafe_storage() ? fps_begin(impl) : nullptr;
}
static inline const void *fps_place(PyObject *tensor) { return fps_place(fps_impl(tensor)); }

/* tensor.grad, or null: what TensorImpl::grad() returns, without its virtual call. */
static inline at::Tensor *fps_grad(const c10::TensorImpl *impl) {
    auto *meta = static_cast<torch::autograd::AutogradMeta *>(impl->autograd_meta());
    return meta && meta->grad_.defined() ? &meta->grad_ : nullptr;
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

/* A tensor's sizes, then its strides. */
using fps_form = at::DimVector;
static inline void fps_note_form(const c10::TensorImpl *impl, fps_form &form) {
    form.clear();
    form.append(impl->sizes().begin(), impl->sizes().end());
    form.append(impl->strides().begin(), impl->strides().end());
}
static inline bool fps_has_form(const c10::TensorImpl *impl, const fps_form &form) {
    const auto sizes = impl->sizes(), strides = impl->strides();
    const size_t dimensions = sizes.size();
    if (form.size() != 2 * dimensions) return false;
    for (size_t i = 0; i < dimensions; i++)
        if (sizes[i] != form[i] || strides[i] != form[dimensions + i]) return false;
    return true;
}

/* Facts about one of a loop's values, gathered once. */
struct fps_value {
    c10::TensorImpl *impl = nullptr;  /* null: not plain; only the attribute works */
    const void *place = nullptr;      /* where its first element lies; null: not plain, or without elements */
    void *data = nullptr;             /* where its storage begins; null: only the attribute can assign it */
    size_t nbytes = 0;
    caffe2::TypeMeta dtype;
    fps_form form;
    at::Tensor held;                  /* the value: else a second holder counts a Python object's reference, with the GIL */

    fps_value() = default;
    explicit fps_value(PyObject *object) : impl(fps_impl(object)), place(fps_place(object)) {
        if (impl) held = THPVariable_Unpack(object);
        if (!fps_plain(object) || impl->storage_offset() || !impl->device().is_cpu()) return;
        c10::StorageImpl *storage = impl->unsafe_storage().unsafeGetStorageImpl();
        data = storage->mutable_data();
        nbytes = storage->nbytes();
        dtype = impl->dtype();
        fps_note_form(impl, form);
    }

    bool has_form_of(c10::TensorImpl *other) const {
        return other->dtype() == dtype && !other->storage_offset() && fps_has_form(other, form);
    }
};

/* value.copy_(tensor) of a tensor in memory whose bytes are its values, of the value's form. */
static inline bool fps_take(PyObject *object, const fps_value &value) {
    c10::TensorImpl *impl = fps_plain(object);
    const c10::DispatchKeySet lazy({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
    if (!value.data || !impl || !impl->device().is_cpu() || impl->key_set().has_any(lazy)) return false;
    if (impl->dtype() != value.dtype || !fps_has_form(impl, value.form) || !fps_begin(impl)) return false;
    memcpy(value.data, fps_begin(impl), value.nbytes);
    return true;
}

/* What is known of a parameter, and its own storage, whose data pointer moves from value to value. */
struct fps_parameter {
    c10::Storage storage;  /* null: none yet */
    void *data = nullptr;  /* the data pointer set last */
    bool borrows = false;  /* the tensor shows a value in that value's storage, which must not move */
    const void *place = nullptr;  /* where it lay when it was last shown or remembered */
    fps_form form;                /* which it had then; empty: not plain */
    bool counts = true;           /* whether a write that torch counts is a change */
    int64_t version = 0;          /* its version counter then, and the writes counted since */

    void drop() {
        storage = c10::Storage();
        data = nullptr;
    }
};

/* What an owned storage keeps: the mapping of all values, and the memory that it had before, in which a NumPy array may look. */
struct fps_kept {
    c10::Storage values;
    at::DataPtr before;
};
static void fps_let_go(void *kept) { delete static_cast<fps_kept *>(kept); }

/* tensor.data = value, for a tensor in its owned storage: one pointer is written, and every tensor that shares the storage
 * follows. */
static inline bool fps_point(PyObject *tensor, fps_parameter &owned, const fps_value &value) {
    c10::TensorImpl *impl = fps_impl(tensor);
    if (!impl || !owned.storage || !value.data) return false;
    c10::StorageImpl *storage = impl->unsafe_storage().unsafeGetStorageImpl();
    if (storage != owned.storage.unsafeGetStorageImpl() || !value.has_form_of(impl)) return false;
    at::DataPtr &own = fps_data(storage);
    if (own.get() != owned.data || own.get_deleter() != fps_let_go || storage->nbytes() != value.nbytes) return false;
    void *kept = own.release_context();  /* nothing is left to destroy: write over it */
    new (&own) at::DataPtr(value.data, kept, fps_let_go, own.device());
    owned.data = value.data;
    return true;
}

/* The reference counts of a tensor's storage and of the storage's Python object. Torch keeps that object once a script has asked
 * for it (tensor.is_shared() does), and some versions then count it as a holder. So it is made here if there is none. */
static std::pair<size_t, Py_ssize_t> fps_holders(const at::Tensor &tensor) {
    PyObject *object = THPStorage_Wrap(tensor.storage());
    std::pair<size_t, Py_ssize_t> found{tensor.storage().use_count(), Py_REFCNT(object)};
    Py_DECREF(object);
    return found;
}

/* The references to a tensor's Python object, if one list and C++ hold it: newer versions of torch count one for all of C++. */
static Py_ssize_t fps_count_if_held() {
    at::Tensor tensor = at::empty({0});
    PyObject *object = THPVariable_Wrap(tensor);
    const Py_ssize_t references = Py_REFCNT(object);
    Py_DECREF(object);
    return references;
}

/* What these counts are where nobody else holds a tensor. They are set while the module is loaded: torch may release the GIL
 * meanwhile, and a function's static would then deadlock with a thread that waits for its initialization and has the GIL. */
static std::pair<size_t, Py_ssize_t> fps_alone;
static Py_ssize_t fps_references;
static void fps_set_counts() {
    fps_alone = fps_holders(at::empty({0}));
    fps_references = fps_count_if_held();
}

/* Whether anybody but the tensor holds its storage. */
static bool fps_is_shared(const at::Tensor &tensor) {
    const std::pair<size_t, Py_ssize_t> found = fps_holders(tensor);
    return found.first > fps_alone.first || found.second > fps_alone.second;
}

/* tensor.data = values: the same shape and strides over other memory, in an owned storage if that memory is the CPU's: the present
 * one at the first time, if others share it, so that they follow, or else a new one. The version counter stays unchanged. */
static inline bool fps_settle(PyObject *tensor, PyObject *values, fps_parameter &owned, const fps_value &value) {
    bool is_first = !owned.storage && !owned.borrows;
    owned.drop();
    c10::TensorImpl *shown = fps_plain(tensor), *from = fps_plain(values);
    if (!shown || !from || !fps_alike(shown, from)) return false;
    if (!shown->allow_tensor_metadata_change() || shown->key_set() != from->key_set() ||
        !fps_equal(shown->strides(), from->strides()) || shown->storage_offset() != from->storage_offset())
        return false;
    const c10::Storage &memory = from->unsafe_storage();
    if (!value.data) {
        shown->set_storage_keep_dtype(memory);
        owned.borrows = true;
        return true;
    }
    auto *kept = new fps_kept{memory, at::DataPtr()};
    at::DataPtr own(value.data, kept, fps_let_go, memory.device());
    owned.data = value.data;
    owned.borrows = false;
    const c10::Storage &present = shown->unsafe_storage();
    if (is_first && present.nbytes() == value.nbytes && fps_is_shared(THPVariable_Unpack(tensor))) {
        owned.storage = present;
        kept->before = owned.storage.set_data_ptr(std::move(own));
        return true;
    }
    owned.storage = c10::Storage(c10::Storage::use_byte_size_t(), value.nbytes, std::move(own), nullptr, false);
    shown->set_storage_keep_dtype(owned.storage);
    return true;
}

/* Count a write in tensor._version, for a tensor with a version counter, or with one `of its own`, which no other tensor shares. */
static inline bool fps_count_write(PyObject *tensor, bool of_its_own) {
    c10::TensorImpl *impl = fps_impl(tensor);
    if (!impl || !impl->version_counter().enabled() || (of_its_own && !impl->unique_version())) return false;
    impl->bump_version();
    return true;
}

/* tensor._version, for a tensor with a version counter. */
static inline bool fps_version(PyObject *tensor, int64_t *version) {
    c10::TensorImpl *impl = fps_impl(tensor);
    if (!impl || !impl->version_counter().enabled()) return false;
    *version = impl->version_counter().current_version();
    return true;
}

/* tensor.grad is value, and lies where value lay, in its form (p.grad.data = other moves it, p.grad.t_() turns it). */
static inline bool fps_grad_is(PyObject *tensor, const fps_value &value, int *same) {
    const c10::TensorImpl *impl = fps_impl(tensor);
    if (!impl || !value.impl) return false;
    const at::Tensor *grad = fps_grad(impl);
    *same = grad && grad->unsafeGetTensorImpl() == value.impl && (!value.place || fps_begin(value.impl) == value.place) &&
            (value.form.empty() || fps_has_form(value.impl, value.form));
    return true;
}

/* tensor.grad = gradient, of which `value` has the facts. */
static inline bool fps_set_grad(PyObject *tensor, PyObject *gradient, const fps_value &value) {
    c10::TensorImpl *impl = fps_plain(tensor);
    if (!impl || !value.data || value.impl != fps_impl(gradient) || impl == value.impl) return false;
    if (!fps_equal(impl->sizes(), value.impl->sizes()) || impl->dtype() != value.impl->dtype() || !impl->is_cpu()) return false;
    impl->mutable_grad() = THPVariable_Unpack(gradient);
    return true;
}

/* tensor.grad = None. */
static inline bool fps_drop_grad(PyObject *tensor) {
    c10::TensorImpl *impl = fps_plain(tensor);
    if (!impl) return false;
    if (at::Tensor *grad = fps_grad(impl)) grad->reset();
    return true;
}

/* Whether tensor.grad is a tensor of the tensor's type that nobody else holds, nor its memory. */
static inline bool fps_has_new_grad(PyObject *tensor) {
    const c10::TensorImpl *impl = fps_plain(tensor);
    const at::Tensor *grad = impl ? fps_grad(impl) : nullptr;
    return grad && grad->use_count() == 1 && grad->dtype() == impl->dtype() &&
           (!grad->unsafeGetTensorImpl()->unsafe_storage() || grad->storage().use_count() == 1);
}

/* Whether Python holds a list's i-th tensor elsewhere, too. */
static inline bool fps_is_referred(PyObject *list, Py_ssize_t i) {
    return Py_REFCNT(PyList_GET_ITEM(list, i)) > fps_references;
}

/* Whether anybody but this list and its facts hold its i-th tensor, or the tensor's memory through another tensor (a view). */
static inline bool fps_is_held(PyObject *list, const std::vector<fps_value> &known, Py_ssize_t i) {
    const c10::TensorImpl *impl = fps_plain(PyList_GET_ITEM(list, i));
    return impl && (fps_is_referred(list, i) || known[i].held.use_count() > 2 || impl->unsafe_storage().use_count() > 1);
}

/* The first such index from `i` on; the list's length: none. */
static inline Py_ssize_t fps_next_held(PyObject *list, const std::vector<fps_value> &known, Py_ssize_t i) {
    while (i < PyList_GET_SIZE(list) && !fps_is_held(list, known, i)) i++;
    return i;
}

/* The same for each tensor of a list, from the i-th on. They return the index of the first for which one of the functions above
 * returns false, or finds a difference; the list's length: none. They are not inline, so that they have all registers. */
static C10_NOINLINE Py_ssize_t fps_point_all(PyObject *list, std::vector<fps_parameter> &known,
                                             const std::vector<fps_value> &values, bool is_write,
                                             std::vector<Py_ssize_t> &uncounted, Py_ssize_t i) {
    for (; i < PyList_GET_SIZE(list); i++) {
        PyObject *tensor = PyList_GET_ITEM(list, i);
        fps_parameter &own = known[i];
        if (!fps_point(tensor, own, values[i])) break;
        own.place = values[i].place;
        if (is_write && fps_count_write(tensor, true)) own.version++;
        else if (is_write) uncounted.push_back(i);
    }
    return i;
}
/* Note the form of a tensor; whether it has still that form. */
static inline void fps_note_form(PyObject *tensor, fps_parameter &own) {
    if (const c10::TensorImpl *impl = fps_plain(tensor)) fps_note_form(impl, own.form);
}
static inline bool fps_has_form(PyObject *tensor, const fps_parameter &own) {
    const c10::TensorImpl *impl = fps_plain(tensor);
    return own.form.empty() || (impl && fps_has_form(impl, own.form));
}
static inline bool fps_is_changed(PyObject *tensor, const fps_parameter &own) {
    int64_t version;
    return fps_place(tensor) != own.place || !fps_has_form(tensor, own) ||
           (own.counts && (!fps_version(tensor, &version) || version != own.version));
}
static C10_NOINLINE Py_ssize_t fps_next_changed(PyObject *list, const std::vector<fps_parameter> &known, Py_ssize_t i) {
    while (i < PyList_GET_SIZE(list) && !fps_is_changed(PyList_GET_ITEM(list, i), known[i])) i++;
    return i;
}
static C10_NOINLINE Py_ssize_t fps_next_other_grad(PyObject *list, const std::vector<fps_value> &known, Py_ssize_t i) {
    for (int same; i < PyList_GET_SIZE(list) && fps_grad_is(PyList_GET_ITEM(list, i), known[i], &same) && same; i++) {}
    return i;
}
static C10_NOINLINE Py_ssize_t fps_set_grads(PyObject *list, PyObject *gradients, const std::vector<fps_value> &known,
                                             Py_ssize_t i) {
    while (i < PyList_GET_SIZE(list) && fps_set_grad(PyList_GET_ITEM(list, i), PyList_GET_ITEM(gradients, i), known[i])) i++;
    return i;
}
static C10_NOINLINE Py_ssize_t fps_drop_grads(PyObject *list, Py_ssize_t i) {
    while (i < PyList_GET_SIZE(list) && fps_drop_grad(PyList_GET_ITEM(list, i))) i++;
    return i;
}

using fps_mapping = std::shared_ptr<at::DataPtr>;
static void fps_unmap(void *mapping) { delete static_cast<fps_mapping *>(mapping); }

/* What tensors keep that were parted from mapped memory: their copy, and the mapping, into which a NumPy array may still look. */
struct fps_parted {
    at::DataPtr copy;
    fps_mapping mapping;
};
static void fps_free_parted(void *parted) { delete static_cast<fps_parted *>(parted); }

/* Move all tensors that share this one's storage to a copy of their values. Returns what keeps the memory mapped that they had;
 * they keep it, too, if they are `seen` by a script, which may have made an array of them. */
static inline fps_mapping fps_move(const at::Tensor &old, bool is_seen) {
    c10::InferenceMode inference(false);
    at::NoGradGuard no_grad;
    c10::StorageImpl *storage = old.storage().unsafeGetStorageImpl();
    int64_t count = storage->nbytes() / old.element_size();
    at::Tensor copy = at::empty({0}, old.options()).set_(old.storage(), 0, {count}, {1}).clone();
    at::DataPtr own = copy.storage().unsafeGetStorageImpl()->set_data_ptr(at::DataPtr(nullptr, old.device()));
    at::DataPtr memory = storage->set_data_ptr(at::DataPtr(nullptr, old.device()));
    fps_mapping mapping = memory.get_deleter() == fps_unmap ? *static_cast<fps_mapping *>(memory.get_context())
                                                            : std::make_shared<at::DataPtr>(std::move(memory));
    void *copied = own.get();
    if (is_seen) own = at::DataPtr(copied, new fps_parted{std::move(own), mapping}, fps_free_parted, old.device());
    storage->set_data_ptr(std::move(own));
    return mapping;
}

/* Move the list's i-th tensor and all that share its storage to a copy, and put a new tensor over the memory into the list.
 * Returns the old one. */
static inline PyObject *fps_part(PyObject *list, Py_ssize_t i) {
    c10::InferenceMode inference(false);
    at::NoGradGuard no_grad;
    at::Tensor old = THPVariable_Unpack(PyList_GET_ITEM(list, i));
    void *data = old.storage().mutable_data();
    const bool is_seen = fps_is_referred(list, i) || fps_is_shared(old);
    at::DataPtr shared(data, new fps_mapping(fps_move(old, is_seen)), fps_unmap, old.device());
    c10::Storage fresh(c10::Storage::use_byte_size_t(), old.storage().nbytes(), std::move(shared), nullptr, false);
    at::Tensor made = at::empty({0}, old.options()).set_(fresh, old.storage_offset(), old.sizes(), old.strides());
    PyObject *parted = Py_NewRef(PyList_GET_ITEM(list, i));
    PyList_SetItem(list, i, THPVariable_Wrap(made));
    return parted;
}

/* If others share a tensor's owned storage, move it and them to a copy. */
static inline bool fps_move_along(PyObject *tensor, fps_parameter &owned) {
    c10::TensorImpl *impl = fps_plain(tensor);
    if (!impl || impl->unsafe_storage().unsafeGetStorageImpl() != owned.storage.unsafeGetStorageImpl()) return false;
    owned.drop();
    owned.borrows = false;
    if (!fps_is_shared(THPVariable_Unpack(tensor))) return false;
    fps_move(THPVariable_Unpack(tensor), true);
    return true;
}
