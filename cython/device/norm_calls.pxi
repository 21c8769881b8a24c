# Forward and backward passes of norms by kernels, with as little as possible between torch and the launches.

cdef object empty = torch.empty, empty_like = torch.empty_like, float32 = torch.float32


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

    cdef object prepare, prepare_backward, launcher_of, dtypes, plain
    cdef public object apply, refuse

    def __init__(self, prepare, prepare_backward, launcher_of, dtypes):
        self.prepare, self.prepare_backward, self.launcher_of = prepare, prepare_backward, launcher_of
        self.dtypes = frozenset(dtypes)
        self.plain = frozenset((torch.Tensor, torch.nn.Parameter))
        self.apply = self.refuse = None

    cdef bint is_plain(self, x) except -1:
        return x is None or type(x) in self.plain

    def launcher(self, x, residual, weight, bias):
        """The launcher, or None if kernels do not take these tensors as they are, or something traces the call."""
        cdef Py_ssize_t cols, count
        if not (self.is_plain(x) and self.is_plain(residual) and self.is_plain(weight) and self.is_plain(bias)):
            return None
        if x.dtype not in self.dtypes or x.dim() == 0:
            return None
        dtype, device = x.dtype, x.get_device()
        if not (is_like(x, dtype, device) and is_like(residual, dtype, device)):
            return None
        if not (is_like(weight, dtype, device) and is_like(bias, dtype, device)):
            return None
        cols, count = x.size(-1), x.numel()
        if count == 0 or count >= cols << 31 or (residual is not None and residual.shape != x.shape):
            return None
        for part in (weight, bias):
            if part is not None and (part.dim() != 1 or part.numel() != cols):
                return None
        return None if is_traced() else self.launcher_of(x)

    def run(self, x, residual, weight, bias, double eps, bint is_centered):
        """y, or y and the sum if there is a residual; None if kernels do not take these as they are."""
        runs = self.launcher(x, residual, weight, bias)
        if runs is None:
            return None
        if is_grad_enabled() and (
            x.requires_grad or (residual is not None and residual.requires_grad)
            or (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
        ):
            return self.apply(x, residual, weight, bias, eps, is_centered, runs)
        y, total, _ = self.forward(runs, x, residual, weight, bias, eps, is_centered)
        return y if residual is None else (y, total)

    def forward(self, runs, x, residual, weight, bias, double eps, bint is_centered):
        """y, the sum, and means (of a layer norm) before reciprocal deviations as one vector."""
        cdef Py_ssize_t cols = x.size(-1), count = x.numel()
        cdef Py_ssize_t rows = count // cols
        cdef uintptr_t words[8]
        y, total = empty_like(x), None if residual is None else empty_like(x)
        stats = empty(2 * rows if is_centered else rows, dtype=float32, device=x.device)
        words[0], words[1], words[2] = y.data_ptr(), address_of(total), stats.data_ptr()
        words[3] = words[2] + 4 * rows if is_centered else words[2]
        words[4], words[5], words[6], words[7] = (
            x.data_ptr(), address_of(residual), address_of(weight), address_of(bias)
        )
        self.go(runs, words, is_centered, count, cols, x.dtype, eps)
        return y, total, stats

    cdef go(self, runs, uintptr_t *words, bint is_centered, count, cols, dtype, eps):
        cdef bint is_aligned = (words[4] | words[5] | words[6] | words[7]) % 16 == 0
        key = ("norm", is_centered, count, cols, dtype, eps, is_aligned)
        cdef Launch launch = (<dict>runs.kept).get(key)
        if launch is None:
            launch = self.prepare(runs, key)
        launch.go(words, 8)

    def launch(self, runs, y, total, mean, rstd, x, residual, weight, bias, eps, bint is_centered):
        """The same into tensors that are there."""
        cdef uintptr_t words[8]
        words[0], words[1], words[2], words[3] = (
            address_of(y), address_of(total), address_of(mean), address_of(rstd)
        )
        words[4], words[5], words[6], words[7] = (
            address_of(x), address_of(residual), address_of(weight), address_of(bias)
        )
        self.go(runs, words, is_centered, x.numel(), x.size(-1), x.dtype, eps)

    def backward(self, runs, dy, add, x, weight, stats, bint is_centered, bint with_weight, bint with_bias):
        """Gradients of x, weight and bias; `add` is added to the first, and `stats` are those of `forward`."""
        cdef Py_ssize_t cols = x.size(-1)
        dtype, device = x.dtype, x.get_device()
        if not is_like(dy, dtype, device):
            dy = dy.to(dtype).contiguous()
        if not is_like(add, dtype, device):
            add = add.to(dtype).contiguous()
        dx, place = empty_like(x), x.device
        dweight = empty(cols, dtype=dtype, device=place) if with_weight else None
        dbias = empty(cols, dtype=dtype, device=place) if with_bias else None
        cdef uintptr_t mean = stats.data_ptr()
        cdef uintptr_t rstd = mean + 2 * <Py_ssize_t>stats.numel() if is_centered else mean
        self.launch_backward(runs, dx, dweight, dbias, dy, add, x, weight, mean if is_centered else None, rstd)
        return dx, dweight, dbias

    def function_forward(self, ctx, x, residual, weight, bias, eps, is_centered, runs):
        """`forward` of a function of autograd: y, or y and the sum if there is a residual."""
        y, total, stats = self.forward(runs, x, residual, weight, bias, eps, is_centered)
        ctx.given = (runs, is_centered)
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
            return dtotal, dtotal if needs[1] else None, None, None, None, None, None
        runs, is_centered = ctx.given
        x, weight, stats = ctx.saved_tensors
        dx, dweight, dbias = self.backward(runs, dy, dtotal, x, weight, stats, is_centered, needs[2], needs[3])
        return dx if needs[0] else None, dx if needs[1] else None, dweight, dbias, None, None, None

    def launch_backward(self, runs, dx, dweight, dbias, dy, add, x, weight, mean, rstd):
        """The same into tensors that are there; a gradient of weight or bias that is None is not wanted.

        Without a mean it is a root mean square norm.
        """
        cdef uintptr_t to_dy = dy.data_ptr(), to_add = address_of(add), to_x = x.data_ptr()
        cdef uintptr_t to_weight = address_of(weight), partial = 0
        cdef bint is_aligned = (to_dy | to_add | to_x | to_weight) % 16 == 0
        cdef bint is_centered = mean is not None, with_weight = dweight is not None, with_bias = dbias is not None
        key = ("norm back", is_centered, x.numel(), x.size(-1), x.dtype, is_aligned, with_weight, with_bias)
        cdef NormLaunches launches = (<dict>runs.kept).get(key)
        if launches is None:
            launches = self.prepare_backward(runs, key)
        if with_weight or with_bias:
            room = empty(2 * launches.part, dtype=float32, device=x.device)
            partial = room.data_ptr()
        launches.go(
            address_of(dx), address_of(dweight), address_of(dbias), to_dy, to_add, to_x, to_weight, address_of(mean),
            address_of(rstd), partial,
        )


cdef object is_grad_enabled = torch.is_grad_enabled
cdef object dispatch_modes = torch._C._len_torch_dispatch_stack
cdef object transforms_active = torch._C._are_functorch_transforms_active
cdef object any_autocast = torch._C._is_any_autocast_enabled


cdef bint is_traced() except -1:
    """True if something sees or changes calls of torch: a dispatch mode, a function transform or autocast."""
    return dispatch_modes() or transforms_active() or any_autocast()
