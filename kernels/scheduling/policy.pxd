# A policy's values, checked and written as words.

from libc.stdint cimport int64_t

from fastps.kernels.scheduling.state cimport policy_t

cdef int policy_from_values(policy_t *policy, dict values, int64_t workers) except -1
cdef int policy_check(const policy_t *policy, int64_t workers) except -1
