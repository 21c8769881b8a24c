# cython: autotestdict=False
"""Tree sums and exact sums of squares over flat host buffers given by address; loops in the headers beside."""

from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport free, malloc


cdef extern from "sum_loops.h" nogil:
    int mps_tree_sum(
        void *out, const void **parts, int count, size_t n, int in_kind, int out_kind, double scale, int threads
    )


cdef extern from "square_loops.h" nogil:
    int mps_square_partials(const void *x, size_t n, size_t block, int kind, int threads, double *values)


cdef extern from "limbs.h" nogil:
    void mps_limbs_add(int64_t *limbs, double x)
    void mps_limbs_carry(int64_t *limbs)
    double mps_limbs_value(const int64_t *limbs)


def tree_sum(
    uintptr_t out, list parts, size_t count, int part_kind, int out_kind, double scale, int threads,
):
    """Write scale * sum of `parts` (addresses) to `out`; kinds: 1 fp32, 2 bf16, 3 fp16, 4 fp64."""
    cdef int number = <int>len(parts)
    cdef int code
    cdef const void **addresses = <const void **>malloc(sizeof(void *) * (number + 1))
    if addresses == NULL:
        raise MemoryError(f"no memory for {number} addresses")
    try:
        for i in range(number):
            addresses[i] = <const void *><uintptr_t>parts[i]
        with nogil:
            code = mps_tree_sum(<void *>out, addresses, number, count, part_kind, out_kind, scale, threads)
    finally:
        free(addresses)
    if code != 0:
        raise ValueError(f"no loop for {number} parts of kind {part_kind} with output kind {out_kind}")


def square_partials(uintptr_t x, size_t count, size_t block, int kind, int threads):
    """Doubles whose exact sum is the sum of the squares of all blocks; kinds as in `tree_sum`."""
    cdef double[68] values  # MPS_PARTIALS
    cdef int number
    with nogil:
        number = mps_square_partials(<const void *>x, count, block, kind, threads, values)
    if number < 0:
        raise ValueError(f"no loop for kind {kind} with blocks of {block}")
    return [values[i] for i in range(number)]


def add_to_limbs(uintptr_t limbs, list values):
    """Add doubles to the int64 limbs of `native.exact_sum` and pass all carries on."""
    cdef int64_t *own = <int64_t *>limbs
    cdef double value
    for value in values:
        mps_limbs_add(own, value)
    mps_limbs_carry(own)


def value_of_limbs(uintptr_t limbs):
    """The double nearest to the sum in limbs, which is not below zero; inf or NaN if any of it was."""
    return mps_limbs_value(<const int64_t *>limbs)
