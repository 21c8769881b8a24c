"""Stage 3 under all that autograd offers: checkpoints, hooks, several passes, no gradients, functions of the user."""

import gc

import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from mpispeed import zero
from mpispeed.base.errors import UsageError
from mpispeed.sharding import module_hooks
from tests.zoo import same_bits
from tests.zoo.cut import WIDTH, check_all_cut, check_like_whole, difference, one_step, own_batches
from tests.zoo.models import Residual, Stack, built
from tests.zoo.training import ORDERED, config, start

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2)]


# -- checkpoints -----------------------------------------------------------------------------------------------------


class Checkpointed(Stack):
    """Blocks with dropout are computed again in backward."""

    def __init__(self, *, reentrant, nested=False, keeps_random=True):
        super().__init__(4)
        self.reentrant, self.nested, self.keeps_random = reentrant, nested, keeps_random
        self.dropout = nn.Dropout(0.2 if keeps_random else 0.0)

    def again(self, fn, x):
        return checkpoint(fn, x, use_reentrant=self.reentrant, preserve_rng_state=self.keeps_random)

    def forward(self, x):
        x = self.first(x)
        if self.nested:
            x = self.again(lambda a: self.again(self.pair(0), self.again(self.blocks[1], a)), x)
            x = self.again(lambda a: self.blocks[3](self.again(self.pair(2), a)), x)
        else:
            for index in range(4):
                x = self.again(self.pair(index), x)
        return self.last(x)

    def pair(self, index):
        return lambda x: self.dropout(self.blocks[index](x))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # what is inside of a reentrant one
@pytest.mark.parametrize("keeps_random", [True, False])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant, nested, keeps_random):
    check_like_whole(lambda: Checkpointed(reentrant=reentrant, nested=nested, keeps_random=keeps_random))


class CheckpointedBlocks(Stack):
    """The block itself is checkpointed; one that reads a weight of another module."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return checkpoint(lambda a: F.linear(a, self.last.weight), x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules(reentrant):
    check_like_whole(lambda: CheckpointedBlocks(reentrant))


def test_checkpoints_of_a_sequence():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(*(Residual() for _ in range(4)))

        def forward(self, x):
            return checkpoint_sequential(self.body, 2, x, use_reentrant=False)

    check_like_whole(Model)


def test_a_whole_model_is_checkpointed():
    def drive(engine, batch, step):
        loss = difference(checkpoint(engine, batch[0], use_reentrant=False), batch[1])
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    check_like_whole(Stack, drive)


# -- passes ----------------------------------------------------------------------------------------------------------


def test_several_forwards_before_one_backward():
    def drive(engine, batch, step):
        outs = [engine(batch[0] * factor) for factor in (1.0, 0.5, 2.0)]
        loss = sum(difference(out, batch[1]) for out in outs)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    check_like_whole(Stack, drive)


def test_retained_graph_with_two_micro_steps():
    def drive(engine, batch, step):
        total = 0.0
        kept = engine(batch[0][:1])
        for factor in (1.0, 3.0):
            loss = difference(kept * factor, batch[1][:1])
            engine.backward(loss, retain_graph=factor == 1.0)
            engine.step()
            total += float(loss.detach())
        return total

    check_like_whole(Stack, drive, like=2, gradient_accumulation_steps=2, train_batch_size=24)


def test_two_heads_in_one_loss():
    class TwoHeads(Stack):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x), torch.tanh(self.other(x))

    def drive(engine, batch, step):
        one, two = engine(batch[0])
        loss = difference(one, batch[1]) + 0.3 * difference(two, -batch[1])
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    check_like_whole(TwoHeads, drive)


@pytest.mark.parametrize("inference", [False, True])
def test_evaluation_between_steps(inference):
    class WithNorm(Stack):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)
            self.dropout = nn.Dropout(0.3)

        def forward(self, x):
            return self.dropout(self.norm(super().forward(x)))

    def drive(engine, batch, step):
        loss = one_step(engine, batch, step)
        engine.eval()
        with torch.inference_mode() if inference else torch.no_grad():
            for _ in range(2):
                loss += float(difference(engine(batch[0]), batch[1]))
        if engine.parts.params.prefetcher is not None:
            engine.empty_partition_cache() if hasattr(
                engine, "empty_partition_cache"
            ) else engine.parts.params.prefetcher.reshard_all()
        engine.train()
        return loss

    check_like_whole(WithNorm, drive, steps=3)


def test_evaluation_with_gradients_on_whose_graph_is_dropped():
    def drive(engine, batch, step):
        engine(batch[0])
        loss = one_step(engine, batch, step)
        out = engine(batch[0])
        del out
        return loss + one_step(engine, batch, step)

    check_like_whole(Stack, drive)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_generation_of_equal_length(mode):
    def drive(engine, batch, step):
        with mode():
            x = batch[0]
            for _ in range(5):
                x = torch.tanh(engine(x))
        loss = difference(engine(x.clone()), batch[1])
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    check_like_whole(Stack, drive)


# -- gradients of another kind ---------------------------------------------------------------------------------------


def test_gradient_penalty_whose_second_graph_keeps_views():
    def drive(engine, batch, step):
        x = batch[0].clone().requires_grad_()
        out = engine(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        loss = difference(out, batch[1]) + grad.square().mean()
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    check_like_whole(Stack, drive, kept=True)


class KeepsWeight(torch.autograd.Function):
    """Keeps the weight as an attribute, not with save_for_backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight, grad.t() @ x


class SavesWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


@pytest.mark.parametrize("function", [KeepsWeight, SavesWeight])
def test_functions_of_the_user(function):
    class Layer(nn.Linear):
        def forward(self, x):
            return torch.tanh(function.apply(x, self.weight)) + self.bias

    check_like_whole(lambda: nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(4))))


# -- hooks of the user -----------------------------------------------------------------------------------------------


class Offloading(Stack):
    """What is saved goes elsewhere, by hooks of the user inside of the model."""

    def __init__(self, context):
        super().__init__()
        self.context = context

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            with self.context():
                x = block(x)
        with self.context():
            return self.last(x)


@pytest.mark.parametrize("context", [save_on_cpu, lambda: saved_tensors_hooks(lambda t: t, lambda t: t)])
def test_saved_tensor_hooks_inside_of_the_model(context):
    check_like_whole(lambda: Offloading(context))


@pytest.mark.parametrize("context", [save_on_cpu, lambda: saved_tensors_hooks(lambda t: (t,), lambda t: t[0])])
def test_saved_tensor_hooks_around_the_engine(context):
    def drive(engine, batch, step):
        with context():
            return one_step(engine, batch, step)

    check_like_whole(Stack, drive)


def test_hooks_of_the_user():
    def drive(engine, batch, step):
        model, seen = engine.module, []
        handles = [
            model.blocks[0].register_forward_pre_hook(lambda m, a: seen.append(float(m.up.weight.detach().sum()))),
            model.blocks[1].register_forward_hook(lambda m, a, out: out * (1 + 0.1 * torch.sigmoid(m.norm.bias.sum()))),
            model.blocks[1].register_full_backward_hook(lambda m, gi, go: seen.append(float(go[0].sum()))),
            model.blocks[2].register_full_backward_pre_hook(lambda m, go: seen.append(float(go[0].sum()))),
            model.last.weight.register_hook(lambda g: g * 0.5),
            model.last.weight.register_post_accumulate_grad_hook(lambda p: seen.append(len(p.shape))),
        ]
        loss = one_step(engine, batch, step)
        for handle in handles:
            handle.remove()
        return loss + sum(seen)

    check_like_whole(Stack, drive)


def test_hooks_that_read_weights_in_backward():
    def drive(engine, batch, step):
        model, seen = engine.module, []
        handles = [
            block.register_full_backward_hook(lambda m, gi, go: seen.append(float(m.up.weight.detach().sum())))
            for block in model.blocks
        ]
        handles.append(model.first.weight.register_hook(lambda g: g + 0.01 * model.last.weight))
        loss = one_step(engine, batch, step)
        for handle in handles:
            handle.remove()
        return loss + sum(seen)

    check_like_whole(Stack, drive)


def test_activations_changed_in_place_are_still_an_error():
    class Spoils(Stack):
        def forward(self, x):
            x = torch.exp(self.first(x))
            y = self.blocks[0](x)
            x.add_(1.0)
            return self.last(y)

    engine = start(config(3, **ORDERED), built(Spoils))
    batch = own_batches(engine, 1)[0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(difference(engine(batch[0]), batch[1]))
    engine.destroy()


def test_inputs_changed_in_place_where_nothing_was_saved():
    class Adds(Stack):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
                x += 1.0
            return self.last(x)

    check_like_whole(Adds)


# -- functional forms ------------------------------------------------------------------------------------------------


def test_functional_call_with_tensors_of_the_user():
    class Scaled(Stack):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                own = {"up.weight": block.up.weight * 0.5, "norm.bias": torch.ones(WIDTH)}
                x = torch.func.functional_call(block, own, (x,))
            return self.last(x)

    check_like_whole(Scaled)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # which torch itself uses for jvp
@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "jacrev"])
def test_torch_func_transforms_are_refused(transform):
    engine = start(config(3, **ORDERED), built(Stack))
    batch = own_batches(engine, 1)[0]
    model, x = engine.module, batch[0]
    calls = {
        "grad": lambda: torch.func.grad(lambda a: model(a).square().sum())(x),
        "vjp": lambda: torch.func.vjp(model, x),
        "jvp": lambda: torch.func.jvp(model, (x,), (x,)),
        "jacrev": lambda: torch.func.jacrev(model)(x),
    }
    for context in (torch.enable_grad, torch.no_grad):
        with context(), pytest.raises(UsageError, match=r"use torch\.autograd\.grad"):
            calls[transform]()
        one_step(engine, batch, 0)
        check_all_cut(engine)
    engine.destroy()


def test_saved_tensor_hooks_that_are_forbidden_are_refused():
    engine = start(config(3, **ORDERED), built(Stack))
    batch = own_batches(engine, 1)[0]
    with disable_saved_tensors_hooks("none here"), pytest.raises(UsageError, match="hooks are forbidden"):
        engine(batch[0])
    with disable_saved_tensors_hooks("none here"), torch.no_grad():
        engine(batch[0])
    one_step(engine, batch, 0)
    check_all_cut(engine)
    engine.destroy()


def test_losses_made_of_gathered_parameters():
    """The graph is made while they are whole, and used when they are cut again."""

    def drive(engine, batch, step):
        model = engine.module
        with zero.GatheredParameters([model.first.weight, model.blocks[0].norm.weight, model.last.bias]):
            penalty = model.first.weight.square().sum() + (model.blocks[0].norm.weight * model.last.bias).sum()
        loss = difference(engine(batch[0]), batch[1]) + 0.1 * penalty
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    # One node multiplies parameters of two units: backward looks at the first while the second takes its turn.
    check_like_whole(Stack, drive, kept=True)


def test_vmap_without_gradients():
    def drive(engine, batch, step):
        with torch.no_grad():
            each = torch.func.vmap(engine.module)(batch[0][:, None])[:, 0]
        loss = difference(engine(batch[0] + 0.1 * each), batch[1])
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    check_like_whole(Stack, drive)


def test_vmap_with_gradients():
    def drive(engine, batch, step):
        out = torch.func.vmap(engine.module)(batch[0][:, None])[:, 0]
        loss = difference(out + engine(batch[0]), batch[1])
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    check_like_whole(Stack, drive)


def test_a_graph_without_a_backward_pass_leaves_nothing_behind():
    """Operations that save their own output would keep it for ever if hooks kept the output itself."""

    class Exp(Stack):
        def forward(self, x):
            self.inner = torch.exp(super().forward(x))
            return torch.tanh(self.inner)

    def kept():
        gc.collect()
        return {id(item) for item in gc.get_objects() if type(item) is module_hooks._Kept}

    engine = start(config(3, **ORDERED), built(Exp))
    others = kept()  # of tests before, whose failures may be remembered
    out = engine(own_batches(engine, 1)[0][0])
    assert kept() - others
    del out, engine.module.inner
    assert not kept() - others
    engine.destroy()


def test_torch_func_over_the_parameters_is_refused():
    engine = start(config(3, **ORDERED), built(Stack))
    batch = own_batches(engine, 1)[0]
    params = dict(engine.module.named_parameters())

    def loss(values):
        return torch.func.functional_call(engine.module, values, (batch[0],)).square().sum()

    with pytest.raises(UsageError, match="cut over"):
        torch.func.grad(loss)(params)
    one_step(engine, batch, 0)
    check_all_cut(engine)
    engine.destroy()


def test_built_is_repeatable():
    first, second = built(Stack), built(Stack)
    same_bits(first.parameters(), second.parameters())
