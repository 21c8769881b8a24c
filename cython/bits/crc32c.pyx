# cython: autotestdict=False
"""CRC-32C of buffers; the code is in crc32c.h."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint32_t, uint64_t, uintptr_t


cdef extern from "crc32c.h" nogil:
    void mps_crc_setup()
    int mps_crc_has_instruction()
    uint32_t mps_crc32c(uint32_t value, const void *data, size_t n, int use_tables)
    uint32_t mps_crc32c_combine(uint32_t crc1, uint32_t crc2, uint64_t length2)


mps_crc_setup()


def has_instruction():
    """Whether this processor computes the checksum in hardware."""
    return mps_crc_has_instruction() != 0


def update(object buffer, uint32_t value=0, bint use_tables=False):
    """Checksum of `buffer`, continuing from the checksum `value` of what stood before."""
    cdef Py_buffer view
    cdef uint32_t crc
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            crc = mps_crc32c(value, view.buf, <size_t>view.len, use_tables)
    finally:
        PyBuffer_Release(&view)
    return crc


def update_at(uintptr_t address, size_t count, uint32_t value=0):
    """Checksum of `count` bytes at `address`, continuing from `value`."""
    cdef uint32_t crc
    with nogil:
        crc = mps_crc32c(value, <const void *>address, count, 0)
    return crc


def combine(uint32_t crc1, uint32_t crc2, uint64_t length2):
    """Checksum of A followed by B, from the checksums of both and the bytes of B."""
    return mps_crc32c_combine(crc1, crc2, length2)
