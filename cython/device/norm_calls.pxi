# Forward and backward passes of norms by kernels, with as little as possible between torch and the launches.


cdef class NormLaunches:
    """Launches of a backward pass.

    Args:
        first: the kernel of the gradient of x, which adds up columns on the way if it takes places for them.
        columns: the kernel that reads again for the sums of columns; None: not needed.
        add_up: adds partial sums; None: no sum is wanted.
        part: floats of the partial sums of one of the two vectors.
    """

    cdef Launch first, columns, add_up
    cdef readonly size_t part

    def __init__(self, Launch first, Launch columns, Launch add_up, size_t part):
        self.first, self.columns, self.add_up, self.part = first, columns, add_up, part

    cdef go(
        self, uintptr_t dx, uintptr_t dweight, uintptr_t dbias, uintptr_t dy, uintptr_t add, uintptr_t x,
        uintptr_t weight, uintptr_t mean, uintptr_t rstd, uintptr_t partial,
    ):
        cdef uintptr_t parts[2]
        cdef uintptr_t words[9]
        parts[0] = partial if dweight else 0
        parts[1] = partial + 4 * self.part if dbias else 0
        if self.first.pointers == 9:
            words[0], words[1], words[2], words[3], words[4] = dx, parts[0], parts[1], dy, add
            words[5], words[6], words[7], words[8] = x, weight, mean, rstd
            self.first.go(words, 9)
        else:
            words[0], words[1], words[2], words[3], words[4], words[5], words[6] = dx, dy, add, x, weight, mean, rstd
            self.first.go(words, 7)
        if self.columns is not None:
            words[0], words[1], words[2], words[3], words[4], words[5] = parts[0], parts[1], dy, x, mean, rstd
            self.columns.go(words, 6)
        if self.add_up is not None:
            words[0], words[1], words[2] = dweight, dbias, parts[0]
            if not dweight:
                words[0], words[1], words[2] = dbias, 0, parts[1]
            self.add_up.go(words, 3)


cdef class NormSize:
    """Launches of norms of one size, looked up once for a forward pass and its backward pass."""

    cdef object runs, dtype
    cdef int device
    cdef Py_ssize_t count, cols
    cdef double eps
    cdef bint is_centered
    cdef Launch aligned, unaligned
    cdef list behind

    cdef bint fits(self, runs, bint is_centered, Py_ssize_t count, Py_ssize_t cols, dtype, double eps, int device):
        return (
            self.runs is runs and self.device == device and self.count == count and self.cols == cols
            and self.dtype is dtype and self.eps == eps and self.is_centered == is_centered
        )


cdef class NormCalls:
    """Norms of tensors that kernels take as they are.

    Args:
        prepare: makes the launch of a forward pass from its launcher and key: is centered, elements, columns, dtype,
            eps, are aligned.
        prepare_backward: makes the `NormLaunches` from launcher and key: is centered, elements, columns, dtype, are
            aligned, the gradients of weight and bias are wanted.
        launcher_of: gives the launcher of a tensor, or None.
        dtypes: what kernels take.
    """

    cdef object prepare, prepare_backward, launcher_of, dtypes
    cdef list sizes
    cdef public object apply, refuse

    def __init__(self, prepare, prepare_backward, launcher_of, dtypes):
        self.prepare, self.prepare_backward, self.launcher_of = prepare, prepare_backward, launcher_of
        self.dtypes = frozenset(dtypes)
        self.sizes = [None] * SIZES
        self.apply = self.refuse = None

    cdef NormSize sized(
        self, runs, bint is_centered, Py_ssize_t count, Py_ssize_t cols, dtype, double eps, int device,
    ):
        """The launches of this size: a key of Python for each call would cost more than the launch."""
        cdef Py_ssize_t at = (count * 31 + cols * 7 + is_centered + (<Py_ssize_t><void *>dtype >> 5)) % SIZES
        cdef NormSize size = <NormSize>self.sizes[at]
        if size is None or not size.fits(runs, is_centered, count, cols, dtype, eps, device):
            size = NormSize.__new__(NormSize)
            size.runs, size.dtype, size.count, size.cols = runs, dtype, count, cols
            size.eps, size.is_centered, size.device, size.behind = eps, is_centered, device, [None] * 8
            self.sizes[at] = size
        return size

    cdef Launch front(self, NormSize size, bint is_aligned):
        cdef Launch launch = size.aligned if is_aligned else size.unaligned
        if launch is None:
            key = ("norm", size.is_centered, size.count, size.cols, size.dtype, size.eps, is_aligned)
            launch = size.runs.kept.get(key) or self.prepare(size.runs, key)
            if is_aligned:
                size.aligned = launch
            else:
                size.unaligned = launch
        return launch

    cdef NormLaunches back(self, NormSize size, bint is_aligned, bint with_weight, bint with_bias):
        cdef int at = is_aligned + 2 * with_weight + 4 * with_bias
        cdef NormLaunches launches = <NormLaunches>size.behind[at]
        if launches is None:
            key = (
                "norm back", size.is_centered, size.count, size.cols, size.dtype, is_aligned, with_weight, with_bias
            )
            launches = size.runs.kept.get(key) or self.prepare_backward(size.runs, key)
            size.behind[at] = launches
        return launches

    cdef NormSize taken(self, x, residual, weight, bias, double eps, bint is_centered):
        """The launches, or None if kernels do not take these tensors as they are, or something traces the call."""
        cdef Py_ssize_t cols, count
        cdef tuple shape
        if not (is_plain(x) and is_plain(residual) and is_plain(weight) and is_plain(bias)):
            return None
        dtype, shape = x.dtype, <tuple>x.shape
        if dtype not in self.dtypes or not shape or not x.is_contiguous():
            return None
        device = x.get_device()
        if not (is_like(residual, dtype, device) and is_like(weight, dtype, device) and is_like(bias, dtype, device)):
            return None
        cols, count = shape[-1], x.numel()
        if count == 0 or count >= cols << 31 or (residual is not None and residual.shape != shape):
            return None
        if not (is_row(weight, cols) and is_row(bias, cols)) or is_traced():
            return None
        runs = self.launcher_of(x)
        return None if runs is None else self.sized(runs, is_centered, count, cols, dtype, eps, device)

    def run(self, x, residual, weight, bias, double eps, bint is_centered):
        """y, or y and the sum if there is a residual; None if kernels do not take these as they are."""
        cdef NormSize size = self.taken(x, residual, weight, bias, eps, is_centered)
        if size is None:
            return None
        if is_grad_enabled() and (
            x.requires_grad or (residual is not None and residual.requires_grad)
            or (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
        ):
            return self.apply(x, residual, weight, bias, size)
        y, total, _ = self.pass_forward(size, x, residual, weight, bias)
        return y if residual is None else (y, total)

    def forward(self, runs, x, residual, weight, bias, double eps, bint is_centered):
        """y, the sum, and means (of a layer norm) before reciprocal deviations as one vector."""
        cdef NormSize size = self.sized(runs, is_centered, x.numel(), x.size(-1), x.dtype, eps, x.get_device())
        return self.pass_forward(size, x, residual, weight, bias)

    cdef tuple pass_forward(self, NormSize size, x, residual, weight, bias):
        cdef Py_ssize_t rows = size.count // size.cols
        cdef uintptr_t words[8]
        shape, dtype = <tuple>x.shape, size.dtype
        y, total = new_of(shape, dtype, size.device), None if residual is None else new_of(shape, dtype, size.device)
        stats = new_flat(2 * rows if size.is_centered else rows, float32, size.device)
        words[0], words[1], words[2] = y.data_ptr(), address_of(total), stats.data_ptr()
        words[3] = words[2] + 4 * rows if size.is_centered else words[2]
        words[4], words[5], words[6], words[7] = (
            x.data_ptr(), address_of(residual), address_of(weight), address_of(bias)
        )
        self.front(size, (words[4] | words[5] | words[6] | words[7]) % 16 == 0).go(words, 8)
        return y, total, stats

    def launch(self, runs, y, total, mean, rstd, x, residual, weight, bias, eps, bint is_centered):
        """The same into tensors that are there."""
        cdef NormSize size = self.sized(runs, is_centered, x.numel(), x.size(-1), x.dtype, eps, x.get_device())
        cdef uintptr_t words[8]
        words[0], words[1], words[2], words[3] = (
            address_of(y), address_of(total), address_of(mean), address_of(rstd)
        )
        words[4], words[5], words[6], words[7] = (
            address_of(x), address_of(residual), address_of(weight), address_of(bias)
        )
        self.front(size, (words[4] | words[5] | words[6] | words[7]) % 16 == 0).go(words, 8)

    def backward(self, runs, dy, add, x, weight, stats, bint is_centered, bint with_weight, bint with_bias):
        """Gradients of x, weight and bias; `add` is added to the first, and `stats` are those of `forward`."""
        cdef NormSize size = self.sized(runs, is_centered, x.numel(), x.size(-1), x.dtype, 0.0, x.get_device())
        return self.pass_backward(size, dy, add, x, weight, stats, with_weight, with_bias)

    cdef tuple pass_backward(self, NormSize size, dy, add, x, weight, stats, bint with_weight, bint with_bias):
        cdef uintptr_t mean
        cdef Py_ssize_t cols = size.cols
        dtype = size.dtype
        if not is_like(dy, dtype, size.device):
            dy = dy.to(dtype).contiguous()
        if not is_like(add, dtype, size.device):
            add = add.to(dtype).contiguous()
        dx = new_of(<tuple>x.shape, dtype, size.device)
        dweight = new_flat(cols, dtype, size.device) if with_weight else None
        dbias = new_flat(cols, dtype, size.device) if with_bias else None
        mean = stats.data_ptr()
        self.launch_sized(
            size, dx.data_ptr(), address_of(dweight), address_of(dbias), dy.data_ptr(), address_of(add), x.data_ptr(),
            address_of(weight), mean if size.is_centered else 0,
            mean + 4 * (size.count // cols) if size.is_centered else mean,
        )
        return dx, dweight, dbias

    cdef launch_sized(
        self, NormSize size, uintptr_t dx, uintptr_t dweight, uintptr_t dbias, uintptr_t dy, uintptr_t add,
        uintptr_t x, uintptr_t weight, uintptr_t mean, uintptr_t rstd,
    ):
        cdef bint is_aligned = (dy | add | x | weight) % 16 == 0
        cdef NormLaunches launches = self.back(size, is_aligned, dweight != 0, dbias != 0)
        cdef uintptr_t partial = 0
        if dweight or dbias:
            room = new_flat(2 * launches.part, float32, size.device)
            partial = room.data_ptr()
        launches.go(dx, dweight, dbias, dy, add, x, weight, mean, rstd, partial)

    def launch_backward(self, runs, dx, dweight, dbias, dy, add, x, weight, mean, rstd):
        """The same into tensors that are there; a gradient of weight or bias that is None is not wanted.

        Without a mean it is a root mean square norm.
        """
        cdef NormSize size = self.sized(runs, mean is not None, x.numel(), x.size(-1), x.dtype, 0.0, x.get_device())
        self.launch_sized(
            size, address_of(dx), address_of(dweight), address_of(dbias), address_of(dy), address_of(add),
            address_of(x), address_of(weight), address_of(mean), address_of(rstd),
        )

    def function_forward(self, ctx, x, residual, weight, bias, NormSize size):
        """`forward` of a function of autograd: y, or y and the sum if there is a residual."""
        y, total, stats = self.pass_forward(size, x, residual, weight, bias)
        ctx.size = size
        if residual is None:
            ctx.save_for_backward(x, weight, stats)
            return y
        ctx.save_for_backward(total, weight, stats)
        ctx.set_materialize_grads(False)
        return y, total

    def function_backward(self, ctx, dy, dtotal=None):
        """`backward` of a function of autograd."""
        cdef tuple needs = ctx.needs_input_grad
        if is_grad_enabled():
            self.refuse(ctx, (dy, dtotal))
        if dy is None:
            return dtotal, dtotal if needs[1] else None, None, None, None
        x, weight, stats = ctx.saved_tensors
        dx, dweight, dbias = self.pass_backward(ctx.size, dy, dtotal, x, weight, stats, needs[2], needs[3])
        return dx if needs[0] else None, dx if needs[1] else None, dweight, dbias, None


cdef enum:
    SIZES = 64  # kept at once; one more takes the place of another


cdef inline bint is_row(x, Py_ssize_t cols) except -1:
    """True for a vector of so many elements, and for None."""
    return x is None or (x.dim() == 1 and x.numel() == cols)
