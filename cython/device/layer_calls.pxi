# A transformer layer between the launches: two functions of autograd around its attention.

cdef object linear = torch.nn.functional.linear, mm = torch.mm, uint8 = torch.uint8


cdef class LayerPasses:
    """Launches of one layer for one size of its input.

    Args:
        runs: where they go.
        key: elements, columns and inner columns, dtype, device, heads, ratio of the dropouts behind attention and MLP,
            eps of the norms, norms stand before, the GELU is kept for backward, seeds are read from memory.
        passes: drop_norm (dropout, residual and norm), drop (dropout and residual), gelu.
        columns: gradients of the dropout and of the GELU.
        norms: of this eps.
    """

    cdef readonly object runs
    cdef tuple key
    cdef object dtype
    cdef Py_ssize_t rows, hidden, inner, heads, floats
    cdef int device, itemsize
    cdef double ratio
    cdef bint is_pre, keeps_gelu, by_place
    cdef Launch drop_norm, drop, gelu
    cdef Columns drop_back, gelu_back
    cdef NormCalls norms
    cdef NormSize norm

    def __init__(self, runs, tuple key, tuple passes, tuple columns, NormCalls norms):
        self.runs, self.key, self.norms = runs, key, norms
        count, self.hidden, self.inner, self.dtype, self.device, self.heads = key[:6]
        self.ratio, eps, self.is_pre, self.keeps_gelu, self.by_place = key[6:]
        self.rows, self.itemsize = count // self.hidden, self.dtype.itemsize
        self.drop_norm, self.drop, self.gelu = passes
        self.drop_back, self.gelu_back = columns
        self.norm = norms.sized(runs, True, count, self.hidden, self.dtype, eps, self.device)
        self.floats = max(self.drop_back.parts, self.gelu_back.parts)

    cdef object matrix(self, Py_ssize_t cols):
        return new_rows(self.rows, cols, self.dtype, self.device)

    cdef object vector(self, Py_ssize_t cols):
        return new_flat(cols, self.dtype, self.device)

    cdef Py_ssize_t block(self):
        """Bytes of a sum and of its means and reciprocal deviations, which are behind it; whole 16 bytes."""
        return (self.rows * (self.hidden * self.itemsize + 8) + 15) // 16 * 16

    cdef drop_and_norm(self, y, uintptr_t total, x, x_bias, residual, weight, bias, uint64_t seed):
        """The sum residual + dropout(x + x_bias) into a block at `total`, and its norm into y."""
        cdef uintptr_t words[9]
        words[0], words[1], words[2] = y.data_ptr(), total, total + self.rows * self.hidden * self.itemsize
        words[3], words[4], words[5] = words[2] + 4 * self.rows, x.data_ptr(), x_bias.data_ptr()
        words[6], words[7], words[8] = residual.data_ptr(), weight.data_ptr(), bias.data_ptr()
        self.drop_norm.go(words, 9, &seed)

    cdef run_gelu(self, g, inner, bias):
        cdef uintptr_t words[3]
        words[0], words[1], words[2] = g.data_ptr(), inner.data_ptr(), bias.data_ptr()
        self.gelu.go(words, 3)

    cdef norm_back(
        self, dx, uintptr_t dy, uintptr_t add, uintptr_t total, weight, bint with_weight, bint with_bias,
    ):
        """Gradients of weight and bias of the norm of a sum in a block at `total`; that of the sum goes into dx."""
        cdef uintptr_t mean = total + self.rows * self.hidden * self.itemsize
        dweight = self.vector(self.hidden) if with_weight else None
        dbias = self.vector(self.hidden) if with_bias else None
        self.norms.launch_sized(
            self.norm, dx.data_ptr(), address_of(dweight), address_of(dbias), dy, add, total, weight.data_ptr(), mean,
            mean + 4 * self.rows,
        )
        return dweight, dbias

    cdef tuple drop_backward(self, dy, object seed, double scale, uintptr_t room):
        """Gradients of a branch that was scaled and dropped from, and of its bias; without both the first is dy."""
        cdef uintptr_t words[3]
        cdef uint64_t number
        dbias = self.vector(self.hidden)
        dx = None if seed is None else self.matrix(self.hidden)
        words[0], words[2] = address_of(dx), dy.data_ptr()
        if seed is None:
            columns_back(self.drop_back, words, 3, dbias, room, NULL)
        else:
            number = word_of(seed)
            columns_back(self.drop_back, words, 3, dbias, room, &number)
        if dx is None:
            dx = dy if dy.dim() == 2 else dy.view(self.rows, self.hidden)
            return (dx, dbias) if scale == 1.0 else (dx * scale, dbias * scale)
        return (dx, dbias) if scale == 1.0 else (dx.mul_(scale), dbias * scale)

    cdef tuple seeds(self, residual):
        """Two seeds, as two draws give them: numbers, or tensors on the device, of which kernels take the place."""
        if self.ratio == 0:
            return None, None
        if self.by_place:
            return (
                randint(1 << 62, (), dtype=int64, device=residual.device),
                randint(1 << 62, (), dtype=int64, device=residual.device),
            )
        return tuple(randint(1 << 62, (2,), dtype=int64, device="cpu").tolist())


cdef class LayerCalls:
    """Both functions, and the choice of their launches.

    Args:
        prepare: makes `LayerPasses` from a launcher and a key, or gives those that it has kept.
        launcher_of: gives the launcher of a tensor, or None.
        is_placed: tells if a seed for a tensor is drawn on its device now.
        vectors: dtype -> elements in 16 bytes, of the dtypes that kernels take.
    """

    cdef object prepare, launcher_of, is_placed
    cdef dict vectors
    cdef list last
    cdef public object refuse

    def __init__(self, prepare, launcher_of, is_placed, vectors):
        self.prepare, self.launcher_of, self.is_placed = prepare, launcher_of, is_placed
        self.vectors, self.last, self.refuse = dict(vectors), [None] * SIZES, None

    def passes(
        self, x, tuple parameters, Py_ssize_t inner, int heads, double ratio, double eps, bint is_pre,
        bint keeps_gelu,
    ):
        """The launches for this input; None if the layer has to be composed of faces.

        That is where no kernels run, where something traces the call or autocast chooses dtypes, and for tensors of
        several dtypes, of gaps, or of rows that are no whole, aligned 16 bytes.
        """
        cdef Py_ssize_t count, hidden, width, at
        cdef uintptr_t bits
        cdef int device
        cdef LayerPasses found
        if not is_plain(x):
            return None
        dtype = x.dtype
        if dtype not in self.vectors or not x.is_contiguous() or is_traced():
            return None
        device, bits = x.get_device(), x.data_ptr()
        for p in parameters:
            if p is None or not is_plain(p) or p.dtype is not dtype or p.get_device() != device:
                return None
            if not p.is_contiguous():
                return None
            bits |= <uintptr_t>p.data_ptr()
        count, hidden, width = x.numel(), x.shape[2], self.vectors[dtype]
        if bits % 16 or not count or hidden % width or inner % width or count // hidden >= 1 << 31 or x.is_meta:
            return None
        runs = self.launcher_of(x)
        if runs is None:
            return None
        at = (count * 31 + hidden * 7 + inner + device) % SIZES
        key = (
            count, hidden, inner, dtype, device, heads, ratio, eps, is_pre, keeps_gelu,
            bool(ratio > 0 and self.is_placed(x)),
        )
        found = <LayerPasses>self.last[at]
        if found is None or found.runs is not runs or found.key != key:
            found = self.prepare(runs, key)
            self.last[at] = found
        return found

    def before_forward(self, ctx, x, norm_w, norm_b, weight, bias, LayerPasses passes):
        """With norms before x itself; then q, k, v by heads, with a bias; without one the projection as it is."""
        cdef uintptr_t words[8]
        cdef Py_ssize_t batch, length, hidden = passes.hidden, heads = passes.heads
        cdef Py_ssize_t size = hidden // heads
        ctx.given = passes, bias is not None
        ctx.set_materialize_grads(False)
        batch, length = x.shape[:2]
        if passes.is_pre:
            n = passes.matrix(hidden)
            stats = new_flat(2 * passes.rows, float32, passes.device)
            words[0], words[1], words[2] = n.data_ptr(), 0, stats.data_ptr()
            words[3], words[4], words[5] = words[2] + 4 * passes.rows, x.data_ptr(), 0
            words[6], words[7] = norm_w.data_ptr(), norm_b.data_ptr()
            passes.norms.front(passes.norm, True).go(words, 8)
            qkv = linear(n, weight, bias)
            ctx.save_for_backward(x, weight, n, norm_w, stats)
        else:
            qkv = linear(x, weight, bias)
            ctx.save_for_backward(x, weight)
        if bias is None:
            return (x, qkv.view(batch, length, 3 * hidden)) if passes.is_pre else qkv
        q, k, v = qkv.as_strided(
            (3, batch, heads, length, size), (hidden, length * 3 * hidden, size, 3 * hidden, 1)
        ).unbind(0)
        return (x, q, k, v) if passes.is_pre else (q, k, v)

    def before_backward(self, ctx, *grads):
        """Gradients of the arguments."""
        cdef LayerPasses passes
        cdef bint is_split
        cdef uintptr_t mean
        if is_grad_enabled():
            self.refuse(ctx, grads)
        passes, is_split = ctx.given
        cdef tuple needs = ctx.needs_input_grad, saved = ctx.saved_tensors
        daround, parts = (grads[0], grads[1:]) if passes.is_pre else (None, grads)
        given = None
        for part in parts:
            if part is not None:
                given = part
                break
        if given is None:
            return daround, None, None, None, None, None
        x, weight = saved[0], saved[1]
        if is_split:
            whole = [(torch.zeros_like(given) if part is None else part).transpose(1, 2) for part in parts]
            given = torch.stack(whole, dim=2)
        flat = given.reshape(passes.rows, 3 * passes.hidden)
        dweight = dbias = None
        if needs[3]:
            dweight = mm(flat.t(), saved[2] if passes.is_pre else x.view(passes.rows, passes.hidden))
        if needs[4]:
            dbias = flat.sum(0)
        if not passes.is_pre:
            return mm(flat, weight).view(x.shape) if needs[0] else None, None, None, dweight, dbias, None
        dn = mm(flat, weight)
        norm_w, stats = saved[3], saved[4]
        if daround is not None and not is_like(daround, passes.dtype, passes.device):
            daround = daround.to(passes.dtype).contiguous()
        dx = new_of(<tuple>x.shape, passes.dtype, passes.device)
        dnorm_w = passes.vector(passes.hidden) if needs[1] else None
        dnorm_b = passes.vector(passes.hidden) if needs[2] else None
        mean = stats.data_ptr()
        passes.norms.launch_sized(
            passes.norm, dx.data_ptr(), address_of(dnorm_w), address_of(dnorm_b), dn.data_ptr(), address_of(daround),
            x.data_ptr(), norm_w.data_ptr(), mean, mean + 4 * passes.rows,
        )
        return dx if needs[0] else None, dnorm_w, dnorm_b, dweight, dbias, None

    def after_forward(
        self, ctx, context, residual, ow, ob, attn_nw, attn_nb, inter_w, inter_b, output_w, output_b, norm_w, norm_b,
        LayerPasses passes, double scale,
    ):
        """The layer's output; `scale` is the factor of both branches.

        Shapes: context [batch, heads, sequence, size], residual [batch, sequence, hidden].
        """
        cdef Py_ssize_t hidden = passes.hidden
        cdef uintptr_t words[4]
        cdef uintptr_t place
        cdef uint64_t number
        cdef tuple shape = <tuple>residual.shape, seeds = passes.seeds(residual)
        ctx.set_materialize_grads(False)
        flat = context.transpose(1, 2).reshape(passes.rows, hidden)
        # Bytes: what converts floats that are saved for backward leaves the statistics in here alone.
        block = new_flat((1 if passes.is_pre else 2) * passes.block(), uint8, passes.device)
        place = block.data_ptr()
        f = passes.matrix(hidden)
        product = linear(flat, ow)
        bias = ob
        if scale != 1.0:
            product, bias = product.mul_(scale), ob * scale
        passes.drop_and_norm(f, place, product, bias, residual, attn_nw, attn_nb, word_of(seeds[0]))
        inner = linear(f, inter_w)
        g = passes.matrix(passes.inner)
        passes.run_gelu(g, inner, inter_b)
        out = linear(g, output_w)
        bias = output_b
        if scale != 1.0:
            out, bias = out.mul_(scale), output_b * scale
        y = new_of(shape, passes.dtype, passes.device)
        number = word_of(seeds[1])
        if passes.is_pre:
            words[0], words[1], words[2], words[3] = y.data_ptr(), out.data_ptr(), bias.data_ptr(), place
            passes.drop.go(words, 4, &number)
        else:
            passes.drop_and_norm(y, place + passes.block(), out, bias, f, norm_w, norm_b, number)
        ctx.given = passes, scale, seeds
        if not passes.keeps_gelu:
            g = None
        ctx.save_for_backward(flat, block, f, inner, g, ow, attn_nw, inter_w, inter_b, output_w, norm_w)
        return y

    def after_backward(self, ctx, dy):
        """Gradients of the arguments."""
        cdef LayerPasses passes
        cdef double scale
        cdef tuple seeds, shape
        cdef tuple needs = ctx.needs_input_grad
        cdef Py_ssize_t hidden, size
        cdef uintptr_t words[5]
        cdef uintptr_t place, room
        if dy is None:
            return (None,) * 14
        if is_grad_enabled():
            self.refuse(ctx, (dy,))
        passes, scale, seeds = ctx.given
        flat, block, f, inner, g, ow, attn_nw, inter_w, inter_b, output_w, norm_w = ctx.saved_tensors
        hidden, shape, place = passes.hidden, <tuple>dy.shape, block.data_ptr()
        if not is_like(dy, passes.dtype, passes.device) or dy.data_ptr() % 16:
            dy = dy.to(passes.dtype).clone(memory_format=torch.contiguous_format)
        partial = new_flat(passes.floats, float32, passes.device)
        room = partial.data_ptr()
        dnorm_w = dnorm_b = None
        if not passes.is_pre:
            dlast = passes.matrix(hidden)
            dnorm_w, dnorm_b = passes.norm_back(
                dlast, dy.data_ptr(), 0, place + passes.block(), norm_w, needs[10], needs[11]
            )
            dy = dlast
        dproduct, doutput_b = passes.drop_backward(dy, seeds[1], scale, room)
        if g is None:
            g = passes.matrix(passes.inner)
            passes.run_gelu(g, inner, inter_b)
        doutput_w = mm(dproduct.t(), g) if needs[8] else None
        g = None
        dg = mm(dproduct, output_w)
        dinner, dinter_b = passes.matrix(passes.inner), passes.vector(passes.inner)
        words[0], words[2], words[3], words[4] = (
            dinner.data_ptr(), dg.data_ptr(), inner.data_ptr(), inter_b.data_ptr()
        )
        columns_back(passes.gelu_back, words, 5, dinter_b, room, NULL)
        dinter_w = mm(dinner.t(), f) if needs[6] else None
        df = mm(dinner, inter_w)
        if not passes.is_pre:
            df.add_(dy)
        dtotal = new_of(shape, passes.dtype, passes.device)
        dattn_nw, dattn_nb = passes.norm_back(
            dtotal, df.data_ptr(), dy.data_ptr() if passes.is_pre else 0, place, attn_nw, needs[4], needs[5]
        )
        da, dob = passes.drop_backward(dtotal, seeds[0], scale, room)
        dow = mm(da.t(), flat) if needs[2] else None
        size = hidden // passes.heads
        dcontext = mm(da, ow).as_strided(
            (shape[0], passes.heads, shape[1], size), (shape[1] * hidden, size, hidden, 1)
        )
        return (
            dcontext, dtotal, dow, dob, dattn_nw, dattn_nb, dinter_w, dinter_b, doutput_w, doutput_b, dnorm_w, dnorm_b,
            None, None,
        )
