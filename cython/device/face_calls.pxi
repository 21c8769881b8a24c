# Bias with GELU, dropout or norm: functions of autograd for tensors that kernels take as they are.

cdef object randint = torch.randint, int64 = torch.int64, contiguous_format = torch.contiguous_format


cdef class Columns:
    """A backward pass with the sums of its columns: a launch, the one that adds partial sums, and their floats."""

    cdef Launch launch, add_up
    cdef readonly size_t parts

    def __init__(self, Launch launch, Launch add_up, size_t parts):
        self.launch, self.add_up, self.parts = launch, add_up, parts


cdef columns_back(Columns columns, uintptr_t *words, int count, dbias, uintptr_t room, uint64_t *seed):
    """Launch a backward pass, of which the second pointer is that of its partial sums, and add them."""
    cdef uintptr_t sums[3]
    words[1] = room
    columns.launch.go(words, count, seed)
    sums[0], sums[1], sums[2] = dbias.data_ptr(), 0, room
    columns.add_up.go(sums, 3)


cdef inline uint64_t word_of(seed) except? 1:
    """What a launch takes for a seed of `LayerPasses.seeds`."""
    if seed is None:
        return 0
    return seed if isinstance(seed, int) else seed.data_ptr()


cdef object draw(x, bint by_place):
    """A seed as `philox.draw_seed` draws it: a number, or a tensor on the device, of which kernels take the place."""
    if by_place:
        return randint(1 << 62, (), dtype=int64, device=x.device)
    return randint(1 << 62, (), dtype=int64, device="cpu").item()


cdef class FacePasses:
    """Launches of a face for one size: forward, backward with its sums, and those of the norm if it has one."""

    cdef object runs, dtype
    cdef tuple key
    cdef Py_ssize_t rows, cols
    cdef int device
    cdef bint by_place
    cdef Launch launch
    cdef Columns back
    cdef NormSize norm

    def __init__(self, runs, tuple key, Launch launch, Columns back):
        self.runs, self.key, self.launch, self.back, self.norm = runs, key, launch, back, None
        self.rows, self.cols, self.dtype, self.device = key[1] // key[2], key[2], key[3], key[4]
        self.by_place = key[6]

    cdef object like(self, x):
        return new_of(<tuple>x.shape, self.dtype, self.device)

    cdef object vector(self):
        return new_flat(self.cols, self.dtype, self.device)

    cdef object whole(self, grad):
        """A gradient as kernels of whole, aligned 16 bytes read it."""
        if grad is None or (is_like(grad, self.dtype, self.device) and grad.data_ptr() % 16 == 0):
            return grad
        return grad.to(self.dtype).clone(memory_format=contiguous_format)

    cdef tuple drop_back(self, grad, seed, bint with_x):
        """Gradients of x, if it is wanted, and of its bias, from that of the sum."""
        cdef uintptr_t words[3]
        cdef uint64_t number = word_of(seed)
        dx, dbias = self.like(grad) if with_x else None, self.vector()
        partial = new_flat(self.back.parts, float32, self.device)
        words[0], words[2] = address_of(dx), grad.data_ptr()
        columns_back(self.back, words, 3, dbias, partial.data_ptr(), &number)
        return dx, dbias


cdef class SoftmaxPasses:
    """Launches of a softmax without mask and dropout for one shape: of tensors that are aligned, and of others."""

    cdef object runs, dtype, scale
    cdef tuple shape
    cdef int device
    cdef bint is_causal
    cdef list forward, backward


cdef class FaceCalls:
    """Faces by kernels at once; each gives None where it has to be computed another way.

    That is for tensors of several dtypes, of gaps, or of rows that are no whole, aligned 16 bytes, without a bias,
    without a dropout or with a seed that is given, and where something traces the call.

    Args:
        prepare: makes `FacePasses` from a launcher and a key, or gives those that it has kept.
        launcher_of: gives the launcher of a tensor, or None.
        is_placed: tells if a seed for a tensor is drawn on its device now.
        vectors: dtype -> elements in 16 bytes, of the dtypes that kernels take.
        norms: launches of norms.

    Attributes:
        prepare_softmax: makes a launch from a launcher, scores or probabilities, "softmax" or "softmax_grad", scale,
            is causal, are aligned; `softmax` sets it.
    """

    cdef object prepare, launcher_of, is_placed
    cdef dict vectors
    cdef NormCalls norms
    cdef list last, softmaxes
    cdef public object apply_gelu, apply_drop, apply_drop_norm, apply_softmax, prepare_softmax, refuse

    def __init__(self, prepare, launcher_of, is_placed, vectors, NormCalls norms):
        self.prepare, self.launcher_of, self.is_placed = prepare, launcher_of, is_placed
        self.vectors, self.norms, self.last = dict(vectors), norms, [None] * SIZES
        self.softmaxes = [None] * SIZES
        self.apply_gelu = self.apply_drop = self.apply_drop_norm = self.apply_softmax = None
        self.prepare_softmax = self.refuse = None

    cdef FacePasses taken(self, str kind, x, residual, tuple vectors, form, bint drops):
        cdef Py_ssize_t count, cols, at
        cdef uintptr_t bits
        cdef int device
        cdef FacePasses found
        if not (is_plain(x) and is_plain(residual)) or x is None:
            return None
        dtype, shape, device = x.dtype, <tuple>x.shape, x.get_device()
        if dtype not in self.vectors or not shape or not x.is_contiguous():
            return None
        cols, count, bits = shape[len(shape) - 1], x.numel(), x.data_ptr()
        if residual is not None:
            if not is_like(residual, dtype, device) or residual.shape != shape:
                return None
            bits |= <uintptr_t>residual.data_ptr()
        for part in vectors:
            if part is None or not is_plain(part) or not is_like(part, dtype, device) or not is_row(part, cols):
                return None
            bits |= <uintptr_t>part.data_ptr()
        if bits % 16 or not count or cols % <Py_ssize_t>self.vectors[dtype] or count // cols >= 1 << 31:
            return None
        if is_traced() or x.is_meta:
            return None
        runs = self.launcher_of(x)
        if runs is None:
            return None
        key = (kind, count, cols, dtype, device, form, drops and bool(self.is_placed(x)))
        at = (count * 31 + cols * 7 + device + <int>(<str>kind)[len(kind) - 1]) % SIZES
        found = <FacePasses>self.last[at]
        if found is None or found.runs is not runs or found.key != key:
            found = self.prepare(runs, key)
            if found.norm is None and kind == "drop norm":
                found.norm = self.norms.sized(runs, True, count, cols, dtype, form[1], device)
            self.last[at] = found
        return found

    def gelu(self, x, bias, str form):
        """GELU of x + bias."""
        cdef FacePasses passes = self.taken("gelu", x, None, (bias,), form, False)
        if passes is None:
            return None
        if is_grad_enabled() and (x.requires_grad or bias.requires_grad):
            return self.apply_gelu(x, bias, passes) if bias.requires_grad else None
        return self.gelu_pass(passes, x, bias)

    cdef object gelu_pass(self, FacePasses passes, x, bias):
        cdef uintptr_t words[3]
        y = passes.like(x)
        words[0], words[1], words[2] = y.data_ptr(), x.data_ptr(), bias.data_ptr()
        passes.launch.go(words, 3)
        return y

    def gelu_forward(self, ctx, x, bias, FacePasses passes):
        """`forward` of a function of autograd."""
        ctx.passes = passes
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, bias)
        return self.gelu_pass(passes, x, bias)

    def gelu_backward(self, ctx, dy):
        """`backward` of a function of autograd."""
        cdef FacePasses passes = ctx.passes
        cdef uintptr_t words[5]
        if is_grad_enabled():
            self.refuse(ctx, (dy,))
        if dy is None:
            return None, None, None
        x, bias = ctx.saved_tensors
        dy = passes.whole(dy)
        dx, dbias, partial = passes.like(x), passes.vector(), new_flat(passes.back.parts, float32, passes.device)
        words[0], words[2], words[3], words[4] = dx.data_ptr(), dy.data_ptr(), x.data_ptr(), bias.data_ptr()
        columns_back(passes.back, words, 5, dbias, partial.data_ptr(), NULL)
        return dx if ctx.needs_input_grad[0] else None, dbias, None

    def drop(self, x, bias, residual, double ratio, seed):
        """residual + dropout(x + bias)."""
        if seed is not None or not 0 < ratio < 1:
            return None
        cdef FacePasses passes = self.taken("drop", x, residual, (bias,), ratio, True)
        cdef bint wanted
        if passes is None or residual is None:
            return None
        wanted = is_grad_enabled() and (x.requires_grad or bias.requires_grad or residual.requires_grad)
        if wanted and not bias.requires_grad:
            return None
        seed = draw(x, passes.by_place)
        if wanted:
            return self.apply_drop(x, bias, residual, seed, passes)
        return self.drop_forward(None, x, bias, residual, seed, passes)

    def drop_forward(self, ctx, x, bias, residual, seed, FacePasses passes):
        """`forward` of a function of autograd, which needs none of its tensors again."""
        cdef uintptr_t words[4]
        cdef uint64_t number = word_of(seed)
        y = passes.like(x)
        words[0], words[1], words[2], words[3] = y.data_ptr(), x.data_ptr(), bias.data_ptr(), residual.data_ptr()
        passes.launch.go(words, 4, &number)
        if ctx is not None:
            ctx.given = passes, seed
            ctx.set_materialize_grads(False)
        return y

    def drop_backward(self, ctx, dy):
        """`backward` of a function of autograd."""
        cdef FacePasses passes
        cdef tuple needs = ctx.needs_input_grad
        if is_grad_enabled():
            self.refuse(ctx, (dy,))
        if dy is None:
            return None, None, None, None, None
        passes, seed = ctx.given
        dx, dbias = passes.drop_back(passes.whole(dy), seed, needs[0])
        return dx, dbias, dy if needs[2] else None, None, None

    def drop_norm(self, x, x_bias, residual, weight, bias, double ratio, double eps, seed):
        """The sum residual + dropout(x + x_bias), and its layer norm."""
        if seed is not None or not 0 < ratio < 1 or residual is None:
            return None
        cdef FacePasses passes = self.taken("drop norm", x, residual, (x_bias, weight, bias), (ratio, eps), True)
        cdef bint wanted
        if passes is None:
            return None
        wanted = is_grad_enabled() and (
            x.requires_grad or x_bias.requires_grad or residual.requires_grad or weight.requires_grad
            or bias.requires_grad
        )
        if wanted and not x_bias.requires_grad:
            return None
        seed = draw(x, passes.by_place)
        if wanted:
            return self.apply_drop_norm(x, x_bias, residual, weight, bias, seed, passes)
        return self.drop_norm_forward(None, x, x_bias, residual, weight, bias, seed, passes)

    def drop_norm_forward(self, ctx, x, x_bias, residual, weight, bias, seed, FacePasses passes):
        """`forward` of a function of autograd."""
        cdef uintptr_t words[9]
        cdef uint64_t number = word_of(seed)
        total, y, stats = passes.like(x), passes.like(x), new_flat(2 * passes.rows, float32, passes.device)
        words[0], words[1], words[2] = y.data_ptr(), total.data_ptr(), stats.data_ptr()
        words[3], words[4], words[5] = words[2] + 4 * passes.rows, x.data_ptr(), x_bias.data_ptr()
        words[6], words[7], words[8] = residual.data_ptr(), weight.data_ptr(), bias.data_ptr()
        passes.launch.go(words, 9, &number)
        if ctx is not None:
            ctx.given = passes, seed
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(total, weight, stats)
        return total, y

    def drop_norm_backward(self, ctx, dtotal, dy):
        """`backward` of a function of autograd."""
        cdef FacePasses passes
        cdef tuple needs = ctx.needs_input_grad
        if is_grad_enabled():
            self.refuse(ctx, (dtotal, dy))
        if dtotal is None and dy is None:
            return (None,) * 7
        passes, seed = ctx.given
        dweight = dbias = None
        if dy is not None:
            total, weight, stats = ctx.saved_tensors
            dtotal, dweight, dbias = self.norms.pass_backward(
                passes.norm, dy, dtotal, total, weight, stats, needs[3], needs[4]
            )
        dtotal = passes.whole(dtotal)
        dx, dx_bias = passes.drop_back(dtotal, seed, needs[0])
        return dx, dx_bias, dtotal if needs[2] else None, dweight, dbias, None, None

    def softmax(self, scores, double scale, bint is_causal):
        """Probabilities of scores of 2 to 4 dims, without mask and dropout."""
        cdef SoftmaxPasses found
        cdef Py_ssize_t cols, count, at
        cdef int device
        cdef tuple shape
        if not is_plain(scores) or scores is None:
            return None
        dtype, shape = scores.dtype, <tuple>scores.shape
        if dtype not in self.vectors or not 2 <= len(shape) <= 4 or not scores.is_contiguous():
            return None
        cols, count, device = shape[len(shape) - 1], scores.numel(), scores.get_device()
        if not count or count // cols >= 1 << 31 or cols >= 1 << 31 or is_traced() or scores.is_meta:
            return None
        runs = self.launcher_of(scores)
        if runs is None:
            return None
        at = (count * 31 + cols * 7 + is_causal) % SIZES
        found = <SoftmaxPasses>self.softmaxes[at]
        if (
            found is None or found.runs is not runs or found.shape != shape or found.dtype is not dtype
            or found.device != device or found.scale != scale or found.is_causal != is_causal
        ):
            found = SoftmaxPasses.__new__(SoftmaxPasses)
            found.runs, found.shape, found.dtype, found.device = runs, shape, dtype, device
            found.scale, found.is_causal = scale, is_causal
            found.forward, found.backward = [None] * 2, [None] * 2
            self.softmaxes[at] = found
        if scores.requires_grad and is_grad_enabled():
            return self.apply_softmax(scores, found)
        return self.softmax_forward(None, scores, found)

    def softmax_forward(self, ctx, scores, SoftmaxPasses passes):
        """`forward` of a function of autograd."""
        cdef uintptr_t words[4]
        cdef uint64_t seed = 0
        cdef bint is_aligned
        cdef Launch launch
        probs = new_of(passes.shape, passes.dtype, passes.device)
        words[0], words[1], words[2], words[3] = scores.data_ptr(), 0, probs.data_ptr(), 0
        is_aligned = (words[0] | words[2]) % 16 == 0
        launch = <Launch>passes.forward[is_aligned]
        if launch is None:
            launch = self.prepare_softmax(
                passes.runs, scores, "softmax", passes.scale, passes.is_causal, bool(is_aligned)
            )
            passes.forward[is_aligned] = launch
        launch.go(words, 4, &seed)
        if ctx is not None:
            ctx.passes = passes
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(probs)
        return probs

    def softmax_backward(self, ctx, grad):
        """`backward` of a function of autograd."""
        cdef SoftmaxPasses passes = ctx.passes
        cdef uintptr_t words[3]
        cdef uint64_t seed = 0
        cdef bint is_aligned
        cdef Launch launch
        if is_grad_enabled():
            self.refuse(ctx, (grad,))
        if grad is None:
            return None, None
        (probs,) = ctx.saved_tensors
        if not is_like(grad, passes.dtype, passes.device):
            grad = grad.to(passes.dtype).contiguous()
        out = new_of(passes.shape, passes.dtype, passes.device)
        words[0], words[1], words[2] = probs.data_ptr(), grad.data_ptr(), out.data_ptr()
        is_aligned = (words[0] | words[1] | words[2]) % 16 == 0
        launch = <Launch>passes.backward[is_aligned]
        if launch is None:
            launch = self.prepare_softmax(
                passes.runs, probs, "softmax_grad", passes.scale, passes.is_causal, bool(is_aligned)
            )
            passes.backward[is_aligned] = launch
        launch.go(words, 3, &seed)
        return out, None
