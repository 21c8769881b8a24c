# Which way a call of a wrapper goes, with as little as possible of Python before its launch.

cdef extern from *:
    """
    #ifdef Py_LIMITED_API /* which does not have it */
    #define MPS_IS_LIMITED 1
    #define PyInstanceMethod_New(function) (Py_INCREF(function), (function))
    #else
    #define MPS_IS_LIMITED 0
    #endif
    """
    bint MPS_IS_LIMITED
    object PyInstanceMethod_New(object function)

cdef enum:
    OPERATOR = 0
    RUN = 1
    APPLY = 2

cdef object is_grad_enabled = torch.is_grad_enabled
cdef object dispatch_modes = torch._C._len_torch_dispatch_stack
cdef object transforms_active = torch._C._are_functorch_transforms_active
cdef object any_autocast = torch._C._is_any_autocast_enabled
cdef object Tensor = torch.Tensor, Parameter = torch.nn.Parameter


cdef inline bint is_plain(x):
    """True for None too."""
    return x is None or type(x) is Tensor or type(x) is Parameter


cdef bint is_traced() except -1:
    """True if something sees or changes calls of torch: a dispatch mode, a function transform or autocast."""
    return dispatch_modes() or transforms_active() or any_autocast()


def route(tuple args, tuple places):
    """How a wrapper computes a call whose tensors, or None, stand at these places of its arguments.

    0: by its operator, or after a closer look, because something traces the call, changes dtypes, or a tensor is of a
    special kind; 1: at once; 2: at once, and a gradient is wanted.
    """
    cdef bint is_wanted = False
    cdef object x
    for place in places:
        x = args[place]
        if x is None:
            continue
        if not (type(x) is Tensor or type(x) is Parameter) or x.is_meta:
            return OPERATOR
        is_wanted = is_wanted or x.requires_grad
    if is_traced():
        return OPERATOR
    return APPLY if is_wanted and is_grad_enabled() else RUN


def bound(function):
    """A function that is compiled, as a method of a class: it gets the object first, without a frame of Python."""
    if MPS_IS_LIMITED:
        return partialmethod(function)
    return PyInstanceMethod_New(function)
