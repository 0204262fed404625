/* One mapping of shared memory, counted by its users: Python views and torch tensors.
 *
 * The last user unmaps it, on whatever thread it is, and without Python: torch frees tensors from thread-local destructors after
 * the interpreter has ended, and a deleter that takes the GIL then ends the process by SIGSEGV. */
#ifndef FPS_MAPPING_H
#define FPS_MAPPING_H

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/atomics.h"
#include "memory/private_view.h"

typedef struct {
    void *address;
    size_t bytes;
    uint32_t users;
    fps_view *view; /* of a private mapping whose first write is noted */
} fps_mapping;

/* Map all of a descriptor, with one user; null with errno set where the kernel refuses. */
static inline fps_mapping *fps_mapping_open(int descriptor, size_t bytes, int writable, int is_private) {
    fps_mapping *mapping = calloc(1, sizeof *mapping);
    if (!mapping) return NULL;
    const int sharing = is_private && !fps_mutant(FPS_MUTANT_WRITE_THROUGH) ? MAP_PRIVATE | MAP_NORESERVE : MAP_SHARED;
    mapping->address = mmap(NULL, bytes, PROT_READ | (writable || is_private ? PROT_WRITE : 0), sharing, descriptor, 0);
    mapping->bytes = bytes;
    mapping->users = 1;
    if (mapping->address == MAP_FAILED) {
        int reason = errno;
        free(mapping);
        errno = reason;
        return NULL;
    }
    /* Mapped for writing at first: what limits private memory refuses it here, and not at a later write. */
    if (is_private && (mapping->view = fps_view_make(mapping->address, bytes))) mprotect(mapping->address, bytes, PROT_READ);
    return mapping;
}

static inline void fps_mapping_close(fps_mapping *mapping) {
    if (!fps_users_drop(&mapping->users)) return;
    if (mapping->view) fps_view_place(&mapping->view->begin, NULL);
    munmap(mapping->address, mapping->bytes);
    free(mapping);
}

/* A DLManagedTensor of the DLPack exchange format, version 0, as every torch that fastps supports reads it (dmlc/dlpack,
 * include/dlpack/dlpack.h), with the words of the structs within it. */
typedef struct fps_dlpack {
    void *data;
    int32_t device_type, device_id, dimensions;
    uint8_t code, bits; /* of the type of an element */
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
    void *owner;
    void (*deleter)(struct fps_dlpack *);
} fps_dlpack;

_Static_assert(sizeof(fps_dlpack) == 64 && offsetof(fps_dlpack, code) == 20 && offsetof(fps_dlpack, owner) == 48,
               "the layout of DLManagedTensor");

static void fps_dlpack_delete(fps_dlpack *managed) {
    fps_mapping_close(managed->owner);
    free(managed);
}

/* A tensor of `dimensions` sizes and strides, to be filled in by the caller, over `data` of the mapping; null: no memory. */
static inline fps_dlpack *fps_dlpack_make(fps_mapping *mapping, void *data, int32_t dimensions, uint8_t code, uint8_t bits) {
    fps_dlpack *managed = calloc(1, sizeof *managed + 2 * (size_t)dimensions * sizeof(int64_t));
    if (!managed) return NULL;
    fps_users_add(&mapping->users);
    managed->owner = mapping;
    managed->deleter = fps_dlpack_delete;
    managed->data = data;
    managed->device_type = 1; /* kDLCPU */
    managed->dimensions = dimensions;
    managed->code = code;
    managed->bits = bits;
    managed->lanes = 1;
    managed->shape = (int64_t *)(managed + 1);
    managed->strides = managed->shape + dimensions;
    return managed;
}

#endif
