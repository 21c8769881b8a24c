# New tensors for outputs of kernels, by torch's C interface, which is stable between releases: a call of torch.empty
# from Python costs more than a launch. Where the interface is not found, torch.empty makes them.

cdef enum:
    MOST_DIMS = 8

ctypedef int32_t (*empty_entry)(
    int64_t dims, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device_type,
    int32_t device_index, void **made,
) noexcept nogil
ctypedef int32_t (*delete_entry)(void *handle) noexcept
ctypedef PyObject *(*wrap_entry)(void *tensor) noexcept

cdef extern from "Python.h":
    void give_back "Py_DECREF" (PyObject *)

cdef object empty = torch.empty, float32 = torch.float32
cdef dict codes = {}
cdef int32_t on_cpu = 0, on_cuda = 1
cdef empty_entry make_empty = NULL
cdef delete_entry delete_handle = NULL
cdef wrap_entry wrap = NULL


def find_interface(names=("_Z16THPVariable_WrapRKN2at10TensorBaseE", "_Z16THPVariable_WrapN2at10TensorBaseE")):
    """Look up torch's C interface in the libraries that are loaded; False if a part of it is missing.

    Args:
        names: of the function that makes an object of Python from a tensor, of which one has to be there.
    """
    global make_empty, delete_handle, wrap, on_cpu, on_cuda
    make_empty = NULL
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    try:
        mode = os.RTLD_NOLOAD | os.RTLD_LAZY
        tensors = ctypes.CDLL(os.path.join(folder, "libtorch_cpu.so"), mode)
        objects = ctypes.CDLL(os.path.join(folder, "libtorch_python.so"), mode)
        to_wrap = next((getattr(objects, name) for name in names if hasattr(objects, name)), None)
        if to_wrap is None:
            return False
        on_cpu, on_cuda = tensors.aoti_torch_device_type_cpu(), tensors.aoti_torch_device_type_cuda()
        for name in ("float32", "float16", "bfloat16", "float64", "int64", "uint8"):
            codes[getattr(torch, name)] = getattr(tensors, f"aoti_torch_dtype_{name}")()
        delete_handle = <delete_entry><uintptr_t>place_of(tensors.aoti_torch_delete_tensor_object)
        wrap = <wrap_entry><uintptr_t>place_of(to_wrap)
        make_empty = <empty_entry><uintptr_t>place_of(tensors.aoti_torch_empty_strided)
    except (OSError, AttributeError):
        return False
    return True


def place_of(function):
    """Where a function of a loaded library begins."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


cdef object new(int dims, int64_t *sizes, dtype, int32_t index):
    """An uninitialized, contiguous tensor on the CUDA device of this index, or for -1 on the host."""
    cdef int64_t strides[MOST_DIMS]
    cdef int64_t stride = 1
    cdef int i
    cdef int32_t kind, device_type = on_cpu if index < 0 else on_cuda, device_index = index if index > 0 else 0
    cdef int32_t has_failed
    cdef void *handle = NULL
    cdef PyObject *made
    code = codes.get(dtype)
    if make_empty is not NULL and code is not None:
        for i in range(dims - 1, -1, -1):
            strides[i] = stride
            stride *= sizes[i] if sizes[i] > 1 else 1
        kind = code
        with nogil:  # as torch does: an allocator may wait
            has_failed = make_empty(dims, sizes, strides, kind, device_type, device_index, &handle)
        if not has_failed:
            made = wrap(handle)
            delete_handle(handle)
            if made is NULL:
                raise MemoryError("torch made no object of a new tensor")
            found = <object>made
            give_back(made)
            return found
    # Without the interface; and torch says best itself why there is no memory.
    return empty([sizes[i] for i in range(dims)], dtype=dtype, device="cpu" if index < 0 else f"cuda:{index}")


cdef object new_flat(int64_t size, dtype, int32_t index):
    """A vector of so many elements."""
    return new(1, &size, dtype, index)


cdef object new_rows(int64_t rows, int64_t cols, dtype, int32_t index):
    """A matrix."""
    cdef int64_t sizes[2]
    sizes[0], sizes[1] = rows, cols
    return new(2, sizes, dtype, index)


cdef object new_of(tuple shape, dtype, int32_t index):
    """A tensor of this shape."""
    cdef int64_t sizes[MOST_DIMS]
    cdef int i, dims = len(shape)
    if dims > MOST_DIMS:
        return empty(shape, dtype=dtype, device="cpu" if index < 0 else f"cuda:{index}")
    for i in range(dims):
        sizes[i] = shape[i]
    return new(dims, sizes, dtype, index)


def new_tensor(tuple shape, dtype, int index):
    """An uninitialized, contiguous tensor on the CUDA device of this index, or for -1 on the host."""
    return new_of(shape, dtype, index)


find_interface()
