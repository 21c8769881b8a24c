# cython: autotestdict=False
"""Choice of tokens by a key; the loop is in choice_loops.h."""

from libc.stdint cimport int32_t, uint64_t, uintptr_t


cdef extern from "choice_loops.h" nogil:
    int mps_choose(int32_t *out, uint64_t key, uint64_t first, size_t batch, size_t tokens, size_t count)


def choose(uintptr_t out, uint64_t key, uint64_t first, size_t batch, size_t tokens, size_t count):
    """Write `count` of `tokens` places, ascending, for each of `batch` samples from number `first` on.

    Raises MemoryError.
    """
    cdef int is_done
    with nogil:
        is_done = mps_choose(<int32_t *>out, key, first, batch, tokens, count)
    if not is_done:
        raise MemoryError(f"no memory to choose among {tokens} tokens")
