# cython: autotestdict=False
"""Update rules over host buffers given by address; the loops are in optim_loops.h."""

from cython cimport final
from cpython.exc cimport PyErr_Clear
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport calloc, free


cdef extern from "dlpack_view.h":
    ctypedef struct mps_dl_tensor:
        void *data
        size_t byte_offset

    ctypedef struct mps_dl_api:
        int (*view)(void *tensor, mps_dl_tensor *out)

    const mps_dl_api *mps_dl_find(void *capsule)
    int mps_dl_kind(const mps_dl_tensor *x)
    int64_t mps_dl_count(const mps_dl_tensor *x)


cdef extern from "optim_loops.h" nogil:
    int MPS_RULES
    int MPS_RULE_LAMB
    int MPS_RULE_ONEBIT_ADAM
    int MPS_DECAYS
    int MPS_DECAY_L2

    ctypedef struct mps_terms:
        float beta1
        float rest1
        float beta2
        float rest2
        float step_size
        float root_scale
        float eps
        float decay
        float grad_scale
        int decay_mode
        int is_eps_inside
        double full_step
        double least
        double most

    ctypedef struct mps_task:
        void *p
        void *a
        void *b
        void *c
        const void *g
        void *out
        size_t n
        int p_kind
        int state_kind
        int g_kind
        int out_kind
        int lot

    int mps_update(
        const mps_task *tasks, size_t count, int rule, const mps_terms *terms, int threads, int half, double *found,
    )


include "../include/levels.pxi"


@final
cdef class Table:
    """Tensors that are updated in one call: addresses, lengths and dtypes, kept between calls.

    A row is (parameter, first state, second state or 0, third state or 0, gradient, out or 0, count, parameter kind,
    state kind, gradient kind, out kind, lot); kinds: 0 none, 1 fp32, 2 bf16, 3 fp16. The caller keeps the memory alive.
    """

    cdef mps_task *tasks
    cdef size_t count
    cdef int lots

    def __cinit__(self, list rows):
        cdef size_t k
        cdef mps_task *task
        self.count = len(rows)
        self.tasks = <mps_task *>calloc(self.count + 1, sizeof(mps_task))
        if self.tasks == NULL:
            raise MemoryError(f"no memory for a table of {self.count} tensors")
        for k in range(self.count):
            p, a, b, c, g, out, n, p_kind, state_kind, g_kind, out_kind, lot = rows[k]
            task = self.tasks + k
            task.p = <void *><uintptr_t>p
            task.a = <void *><uintptr_t>a
            task.b = <void *><uintptr_t>b
            task.c = <void *><uintptr_t>c
            task.g = <const void *><uintptr_t>g
            task.out = <void *><uintptr_t>out
            task.n = n
            task.p_kind, task.state_kind, task.g_kind, task.out_kind = p_kind, state_kind, g_kind, out_kind
            task.lot = lot
            if not (1 <= p_kind <= 3 and 1 <= state_kind <= 3 and 1 <= g_kind <= 3):
                raise ValueError(f"row {k} has the kinds {(p_kind, state_kind, g_kind)}; they go from 1 to 3")
            if out and not 1 <= out_kind <= 3 or lot < 0:
                raise ValueError(f"row {k} has the out kind {out_kind} and the lot {lot}")
            self.lots = max(self.lots, task.lot + 1)

    def __dealloc__(self):
        free(self.tasks)

    def set_grads(self, list addresses):
        """New addresses of all gradients, in the order of the rows."""
        cdef size_t k
        if <size_t>len(addresses) != self.count:
            raise ValueError(f"{len(addresses)} addresses for a table of {self.count} tensors")
        for k in range(self.count):
            self.tasks[k].g = <const void *><uintptr_t>addresses[k]

    def take(self, capsule, tuple types, list params, list grads, list outs):
        """Whether all tensors are those of the rows; if so, the addresses of the gradients are taken.

        Parameters and outs must be at the addresses of the rows, all three of their lengths and dtypes, contiguous,
        on the host and of one of the two `types`, whose `capsule` is DLPack's exchange interface; `outs` may be empty.
        """
        cdef size_t k
        cdef bint has_outs = len(outs) > 0
        cdef const void *address
        cdef mps_task *task
        cdef object first = types[0], second = types[1]
        cdef const mps_dl_api *api = mps_dl_find(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"))
        if api == NULL or <size_t>len(params) != self.count or <size_t>len(grads) != self.count:
            return False
        if has_outs and <size_t>len(outs) != self.count:
            return False
        for k in range(self.count):
            task = self.tasks + k
            if has_outs != (task.out != NULL) and task.n:
                return False
            if not fits(api, params[k], first, second, task.n, task.p_kind, &address) or address != task.p and task.n:
                return False
            if has_outs and (
                not fits(api, outs[k], first, second, task.n, task.out_kind, &address)
                or address != task.out and task.n
            ):
                return False
            if not fits(api, grads[k], first, second, task.n, task.g_kind, &address):
                return False
            task.g = address
        return True

    def run(self, int rule, list terms, int threads, int half=0, list given=None):
        """Update everything with the terms of each lot; gives the trust ratios (LAMB only).

        Terms are (beta1, beta2, step size, root scale, eps, decay, decay mode, gradient scale, is eps inside,
        least ratio, most ratio). Of LAMB there are halves: 1 updates states and gives, row by row, the sums of squares
        of parameter and direction; 2 updates parameters by the trust ratios that are `given`.
        """
        cdef size_t k, lots = len(terms), results = 0
        cdef int code
        cdef mps_terms *packed
        cdef double *found
        if half and (rule != MPS_RULE_LAMB or not 1 <= half <= 2):
            raise ValueError(f"rule {rule} has no half {half}")
        if half == 2 and (given is None or <size_t>len(given) != self.count):
            raise ValueError(f"{None if given is None else len(given)} ratios for a table of {self.count} tensors")
        if not 0 <= rule < MPS_RULES or lots < <size_t>self.lots:
            raise ValueError(f"rule {rule} with {lots} terms for {self.lots} lots")
        packed = <mps_terms *>calloc(lots + 1, sizeof(mps_terms))
        found = <double *>calloc(2 * self.count + 1, sizeof(double))
        try:
            if packed == NULL or found == NULL:
                raise MemoryError(f"no memory for the terms of {self.count} tensors")
            for k in range(lots):
                pack(packed + k, terms[k])
                if rule >= MPS_RULE_ONEBIT_ADAM and packed[k].decay_mode == MPS_DECAY_L2:
                    raise ValueError(f"rule {rule} has no L2 decay")
            if half == 2:
                for k in range(self.count):
                    found[k] = given[k]
            with nogil:
                code = mps_update(self.tasks, self.count, rule, packed, threads, half, found)
            if code != 0:
                raise MemoryError(f"no memory for the sums of {self.count} tensors")
            if rule == MPS_RULE_LAMB and half != 2:
                results = 2 * self.count if half == 1 else self.count
            return [found[k] for k in range(results)]
        finally:
            free(packed)
            free(found)


cdef bint fits(
    const mps_dl_api *api, object x, object first, object second, size_t count, int kind, const void **address,
):
    """Whether a tensor is as a row has it; gives its address."""
    cdef mps_dl_tensor view
    if type(x) is not first and type(x) is not second:
        return False
    if api.view(<void *>x, &view):
        PyErr_Clear()  # sparse, for one
        return False
    address[0] = <const void *>(<const char *>view.data + view.byte_offset)
    return mps_dl_kind(&view) == kind and mps_dl_count(&view) == <int64_t>count


cdef int pack(mps_terms *t, tuple values) except -1:
    cdef double beta1, beta2
    beta1, beta2, t.full_step, t.root_scale, t.eps, t.decay, mode, t.grad_scale, inside, t.least, t.most = values
    if not 0 <= mode < MPS_DECAYS:
        raise ValueError(f"decay mode {mode}; modes go from 0 to {MPS_DECAYS - 1}")
    t.beta1 = <float>beta1
    t.rest1 = <float>(1.0 - beta1)
    t.beta2 = <float>beta2
    t.rest2 = <float>(1.0 - beta2)
    t.step_size = <float>t.full_step
    t.decay_mode = mode
    t.is_eps_inside = inside
    return 0
