"""The failpoints for Python: count the stores to shared memory, die at the n-th, switch a mutant on."""

from libc.stdint cimport int64_t

from fastps.kernels.base.failpoints cimport FPS_N_MUTANTS, fps_failpoints

cdef extern from "base/failpoints.h" nogil:
    """
    static const char *const fps_mutant_names[] = {
    #define FPS_MUTANT_NAME(symbol, name, text) name,
        FPS_MUTANTS(FPS_MUTANT_NAME)
    };
    static const char *const fps_mutant_texts[] = {
    #define FPS_MUTANT_TEXT(symbol, name, text) text,
        FPS_MUTANTS(FPS_MUTANT_TEXT)
    };
    """
    const char **fps_mutant_names
    const char **fps_mutant_texts

# Name to what is wrong.
MUTANTS = {fps_mutant_names[index].decode(): fps_mutant_texts[index].decode() for index in range(FPS_N_MUTANTS)}


def stores():
    """Stores to shared memory so far, by this process."""
    return fps_failpoints.stores


def accesses():
    """Stores and loads so far, by this process."""
    return fps_failpoints.accesses


def die_at(int64_t store):
    """Die by SIGKILL just before the store-th store from now on, counted from 1; 0: never."""
    if store < 0:
        raise ValueError(f"expected a store of at least 1, or 0 for never, found {store}")
    fps_failpoints.die_at = fps_failpoints.stores + store if store else 0


def stop_at(int64_t store):
    """Stop by SIGSTOP just before the store-th store from now on, counted from 1; 0: never."""
    if store < 0:
        raise ValueError(f"expected a store of at least 1, or 0 for never, found {store}")
    fps_failpoints.stop_at = fps_failpoints.stores + store if store else 0


def switch_on(str mutant):
    """Switch one of MUTANTS on, for the whole process; None: none of them."""
    names = list(MUTANTS)
    if mutant is not None and mutant not in MUTANTS:
        raise ValueError(f"expected one of {', '.join(names)}, found {mutant!r}")
    fps_failpoints.mutant = -1 if mutant is None else names.index(mutant)
