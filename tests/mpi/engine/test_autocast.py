"""The sections torch_autocast and amp: the bits of torch's autocast around fp32, at every stage and number of ranks."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mpispeed
from mpispeed.base.errors import ConfigError
from mpispeed.compat import torch_autocast
from mpispeed.pipe.module import PipelineModule
from tests.helpers.covering import in_turn, on_ranks
from tests.zoo import same_bits
from tests.zoo.training import ADAM, config, start, weights

pytestmark = pytest.mark.mpi(min_size=1)
WIDTH, ROWS = 8, 12
BF16 = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
FP16 = {"torch_autocast": {"enabled": True, "dtype": "fp16"}}
SECTIONS = {"bf16": BF16, "fp16": FP16, "O1": {"amp": True}}
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Net(nn.Module):
    """Products, which autocast lowers, between norms and a loss, which it does not."""

    def __init__(self, *, recomputes=False):
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.recomputes = recomputes
        self.seen = []

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x))
        out = self.head(x)
        self.seen.append(out.dtype)
        return F.cross_entropy(out, ids)


def data(steps=3):
    return torch.randint(9, (steps, ROWS), generator=torch.Generator().manual_seed(2))


def own(engine, batch):
    count = ROWS // engine.dp_world_size
    return batch[engine.mpispeed.parts.mesh.index("data") * count :][:count]


def train(engine, steps=3):
    losses = []
    for batch in data(steps):
        loss = engine(own(engine, batch))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def plainly(dtype, steps=3, clip=0.0, skips=0):
    """Torch's autocast around a model in fp32, on whole batches; the first updates may be left out."""
    model, losses = Net(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, batch in enumerate(data(steps)):
        with torch.autocast("cpu", dtype):
            loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if step >= skips:
            optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


@STAGES
@pytest.mark.ranks(1)
def test_one_rank_trains_as_torch_does(stage):
    model, losses = plainly(torch.bfloat16)
    engine = start(config(stage, ROWS, **ADAM, **BF16), Net())
    assert train(engine) == losses
    assert set(engine.module.seen) == {torch.bfloat16}
    # Adam's own loops and torch's round differently by a few units of 2^-24.
    for name, tensor in weights(engine).items():
        torch.testing.assert_close(tensor.float(), dict(model.named_parameters())[name], rtol=1e-2, atol=1e-3)
    engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.ranks(2, 3)
def test_stages_that_cut_states_train_alike(stage):
    """Stage 0 rounds a sum in 16 bits twice, as with bf16."""
    ordered = {**ADAM, **BF16, "reduction": "ordered", "gradient_clipping": 0.5}
    engine, base = start(config(stage, ROWS, **ordered), Net()), start(config(1, ROWS, **ordered), Net())
    assert train(engine) == train(base)
    same_bits(masters(engine), masters(base))
    engine.destroy()
    base.destroy()


@pytest.mark.parametrize(("stage", "name"), on_ranks([0, 1, 2, 3], list(SECTIONS)))
def test_ranks_train_near_one_process(stage, name):
    section = SECTIONS[name]
    dtype = torch.bfloat16 if section is BF16 else torch.float16
    engine = start(config(stage, ROWS, **ADAM, **section), Net())
    found = torch.tensor(train(engine), dtype=torch.float64)
    engine.mpispeed.parts.mesh["data"].all_reduce(found)
    skips = engine.skipped_steps  # a rank whose few samples agree may overflow at the first scale, as in GradScaler
    assert skips <= (dtype == torch.float16)
    _, losses = plainly(dtype, skips=skips)
    # Products round to 2^-9 (bf16) or 2^-12; gradients are rounded once more for each rank.
    bound = 2e-2 if dtype == torch.bfloat16 else 3e-3
    torch.testing.assert_close(found / engine.dp_world_size, torch.tensor(losses).double(), rtol=bound, atol=0)
    assert engine.optimizer.cur_scale == (1.0 if dtype == torch.bfloat16 else 2.0 ** (16 - skips))
    assert engine.dynamic_loss_scale() == (dtype == torch.float16)
    engine.destroy()


def masters(engine):
    return {
        name: mpispeed.zero.safe_get_full_fp32_param(param).clone() for name, param in engine.module.named_parameters()
    }


@pytest.mark.parametrize("stage", in_turn([0, 1, 2, 3]))
def test_what_the_masters_are_and_what_travels(stage):
    engine = start(config(stage, ROWS, **ADAM, **BF16), Net())
    states = {
        entry.name: unit.states for unit in engine.mpispeed.parts.table.all_units for entry in unit.layout.entries
    }
    for name, kept in states.items():
        is_lowered = not name.startswith("table") and ".0." not in name[8:]  # neither the embedding nor a norm
        assert kept.wire == (torch.bfloat16 if is_lowered else torch.float32), name
        assert kept.compute == (torch.bfloat16 if is_lowered and stage == 3 else torch.float32), name
        assert kept.full == torch.float32
        assert kept.master_is_param == (kept.compute == torch.float32)
    for name, param in engine.module.named_parameters():
        assert torch_autocast.has_comm_dtype(param)
        assert torch_autocast.get_comm_dtype(param) == states[name].wire
    assert not torch_autocast.has_comm_dtype(nn.Parameter(torch.ones(1)))
    assert engine.torch_autocast_enabled()
    assert engine.torch_autocast_dtype() == torch.bfloat16
    engine.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_recomputation_gives_the_same_bits(stage):
    settings = config(stage, ROWS, **ADAM, **BF16)
    engine, other = start(settings, Net()), start(settings, Net(recomputes=True))
    assert train(engine) == train(other)
    same_bits(masters(engine), masters(other))
    engine.destroy()
    other.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "other"), [(1, 3), (3, 0)])
def test_a_run_goes_on_at_another_stage(stage, other, mpi_tmp_path):
    settings = config(stage, ROWS, **ADAM, **FP16)
    engine = start(settings, Net())
    train(engine)
    expected = masters(engine)
    engine.save_checkpoint(str(mpi_tmp_path))
    engine.destroy()
    resumed = start(config(other, ROWS, **ADAM, **FP16), Net())
    resumed.load_checkpoint(str(mpi_tmp_path))
    same_bits(masters(resumed), expected)
    assert resumed.optimizer.cur_scale == 2.0**16
    train(resumed, 1)
    resumed.destroy()


def mean_square(out, target):
    return F.mse_loss(out, target)


@pytest.mark.mpi(min_size=2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("section", [BF16, FP16, {"amp": {"enabled": True, "opt_level": "O2"}}])
def test_stages_of_a_pipeline_compute_as_the_whole_does(section):
    def run(stages):
        torch.manual_seed(3)
        layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        model = PipelineModule(layers, num_stages=stages, loss_fn=mean_square, partition_method="uniform")
        settings = config(0, 8, 2 if stages == 2 else 1, **ADAM, **section)
        engine = mpispeed.initialize(model=model, config=settings)[0]
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
        rows = x if stages == 2 else x.view(2, 2, 2, WIDTH)[:, engine.mpispeed.parts.mesh.index("data")].reshape(-1, 8)
        parts = rows.chunk(2 if stages == 2 else 1)
        losses = [float(engine.train_batch(iter([(part, part.sin()) for part in parts]))) for _ in range(3)]
        engine.destroy()
        return losses

    # Gradients of one sample after the other add up otherwise than those of ranks: 2^-8 of a loss below 1.
    torch.testing.assert_close(torch.tensor(run(2)), torch.tensor(run(1)), rtol=4e-3, atol=0)


# -- amp -------------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inputs = []

    def forward(self, x, *, shift):
        self.inputs += [x.dtype, shift.dtype]
        return self.last(self.norm(self.first(x + shift)))


LEVELS = {
    "O0": (torch.float32, torch.float32, torch.float32, 1.0),
    "O1": (torch.float32, torch.float32, torch.float16, 2.0**16),
    "O2": (torch.float16, torch.float32, torch.float32, 2.0**16),
    "O3": (torch.float16, torch.float16, torch.float32, 1.0),
}


@pytest.mark.filterwarnings("ignore:.*An output with one or more elements was resized")
@pytest.mark.parametrize(("level", "stage"), on_ranks(list(LEVELS), [0, 1, 2, 3]))
def test_levels_of_apex(level, stage):
    model, norm, output, scale = LEVELS[level]
    engine = start(config(stage, ROWS, **ADAM, amp={"enabled": True, "opt_level": level}), Normed())
    x = torch.randn(ROWS // engine.dp_world_size, WIDTH, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(4):
        out = engine(x, shift=x.cos())
        assert out.dtype == output
        loss = (out.float() - x).square().mean() / 8  # no overflow at the first scale
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    found = {name: param.dtype for name, param in engine.module.named_parameters()}
    assert {dtype for name, dtype in found.items() if "norm" not in name} == {model}
    assert {found["norm.weight"], engine.module.norm.running_mean.dtype} == {norm}
    assert set(engine.module.inputs) == {model}
    assert engine.mpispeed.parts.scaler.scale == scale
    assert bool(engine.mpispeed.parts.params.shards.master_bytes) == (level == "O2")  # others are their own masters
    assert engine.amp_enabled()
    assert not engine.skipped_steps
    engine.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_an_overflow_halves_the_scale_and_skips_the_step(stage):
    amp = {"enabled": True, "loss_scale": "dynamic", "max_loss_scale": 2.0**10}
    engine = start(config(stage, ROWS, **ADAM, amp=amp), Net())
    before = masters(engine)
    loss = engine(own(engine, data(1)[0]))
    engine.backward(loss * float("inf"))
    engine.step()
    assert engine.skipped_steps == 1
    assert engine.optimizer.cur_scale == 2.0**9
    same_bits(masters(engine), before)
    engine.destroy()


@pytest.mark.ranks(1)
def test_a_class_that_does_not_exist_is_named():
    section = {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Lineal"]}}
    with pytest.raises(ConfigError, match=r'names "torch\.nn\.Lineal", which cannot be found'):
        start(config(0, ROWS, **ADAM, **section), Net())
