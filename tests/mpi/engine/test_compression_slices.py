"""Compression under engines whose layers are sliced: training is that of full layers, checkpoints fit other slices."""

import pytest
import torch
from torch import nn

from mpispeed import zero
from mpispeed.base.errors import ConfigError
from mpispeed.checkpoints import open_checkpoint
from mpispeed.compression import init_compression
from mpispeed.nn.tensor import ColumnLinear, cuts
from mpispeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from tests.helpers import compression as given
from tests.helpers.compression import ALL, BATCH, batches, model, settings
from tests.helpers.covering import in_turn
from tests.helpers.expert_training import same_tensors
from tests.helpers.own_cut import Mpu
from tests.helpers.pipes import gpt_layers
from tests.helpers.tensor import assert_near, joined
from tests.zoo import same_bits
from tests.zoo.training import start, train_averaged, weights

pytestmark = pytest.mark.mpi(min_size=2)

LEARNED = {
    **given.bits(4, 4, 1, ["mlp"], quantize_weight_in_forward=True, rounding="stochastic", quantize_groups=8),
    "sparse_pruning": given.technique(["attention"], {"dense_ratio": 0.5}, method="topk"),
}
SECTIONS = {"all": ALL, "learned": LEARNED, "learned, ranges": LEARNED | given.STATIC}


def sliced(section, stage, slices, **more):
    """Settings; on three ranks only perceptrons are sliced, as attention has two heads."""
    policy = {key: kind for key, kind in gpt_layers.SLICES.items() if slices == 2 or key.startswith("mlp")}
    if slices > 1:
        more["tensor_parallel"] = {"autotp_size": slices, "injection_policy_tuple": policy}
    return settings(section, stage, **more)


def doubles():
    """In doubles another order of sums moves nothing across a border of rounding."""
    return model().double()


def trained(section, stage, slices, net, steps=3):
    engine = start(sliced(section, stage, slices), net)
    losses, known = train_averaged(engine, batches(steps)), cuts(engine.module)
    comm = engine.mpispeed.parts.mesh["model"]
    tensors = {**weights(engine), **dict(engine.module.named_buffers())}
    found = {name: joined(comm, known.get(name), value) for name, value in tensors.items()}
    assert any(isinstance(each, ColumnLinear) for each in engine.module.modules()) is (slices > 1)
    engine.destroy()
    return losses, found


def slices_of(comm):
    return 3 if comm.size == 3 else 2


@pytest.mark.parametrize(
    ("name", "stage", "way"),
    in_turn([("all", 3, "alone"), ("learned", 1, "before"), ("all", 2, "before")], (2, 3, 4)),
)
def test_training_is_that_of_full_layers(comm, name, stage, way):
    section, net = SECTIONS[name], doubles()
    losses, expected = trained(section, 0, 1, doubles())
    if way == "before":
        init_compression(net, sliced(section, stage, slices_of(comm)))
    found, tensors = trained(section, stage, slices_of(comm), net)
    assert found == pytest.approx(losses, rel=1e-6)
    assert tensors.keys() == expected.keys()
    for key, value in tensors.items():
        if value.dtype == torch.bool:
            assert torch.equal(value, expected[key]), key
        else:
            assert_near(value, expected[key], 1e-5, key)


@pytest.mark.parametrize("name", in_turn(["all", "learned, ranges"], (2, 4)))
def test_a_model_that_was_sharded_as_it_was_built(comm, name):
    """A rank has one layer in full at a time, with its scores and masks; it changes no bit."""
    nets, section = [model()], SECTIONS[name]
    with zero.Init(config_dict_or_path=sliced(section, 3, 1)):
        nets.append(model())
    for net in nets:
        init_compression(net, sliced(section, 3, 2))
    one, two = (trained(section, 3, 2, net, 2) for net in nets)
    same_bits(one[0], two[0])
    same_bits(one[1], two[1])


@pytest.mark.parametrize(("name", "stage"), in_turn([("all", 1), ("learned, ranges", 3)], (2, 3)))
def test_a_checkpoint_fits_other_slices(comm, mpi_tmp_path, name, stage):
    """Scores, masks and ranges too."""
    section = SECTIONS[name]
    engine = start(sliced(section, stage, slices_of(comm)), doubles())
    train_averaged(engine, batches(3))
    engine.save_checkpoint(str(mpi_tmp_path), tag="first")
    engine.destroy()
    opened = open_checkpoint(mpi_tmp_path, "first")
    whole = doubles()
    init_compression(whole, settings(section))
    assert set(opened.names()) == {key for key, _ in whole.named_parameters()}
    for slices in (1, slices_of(comm)):
        engine = start(sliced(section, 3 - stage, slices), doubles())
        engine.load_checkpoint(str(mpi_tmp_path), tag="first")
        engine.save_checkpoint(str(mpi_tmp_path), tag="again")
        assert same_tensors(mpi_tmp_path / "again", mpi_tmp_path / "first")
        again = open_checkpoint(mpi_tmp_path, "again")
        for key in opened.buffers():
            assert torch.equal(again.read_whole(key, "buffer"), opened.read_whole(key, "buffer")), key
        engine.destroy()


class OwnLinear(nn.Linear):
    """A column-parallel layer of a model that slices itself."""

    def __init__(self, rank):
        super().__init__(4, 6)
        self.weight.data.add_(rank)
        self.weight.tensor_model_parallel, self.weight.partition_dim = True, 0


@pytest.mark.ranks(2, 4)
def test_layers_that_the_model_slices_itself_may_have_their_weights_quantized():
    mpu = Mpu(2)
    nets = [nn.Sequential(OwnLinear(mpu.get_model_parallel_rank()), nn.Linear(6, 2)) for _ in range(2)]
    engine = start(settings(given.bits(8, 8, 1, ["0"], quantize_weight_in_forward=True)), nets[0], mpu=mpu)
    assert set(engine.compression.layers) == {"0"}
    engine.destroy()
    rows = {"row_pruning": given.technique(["0"], {"dense_ratio": 0.5}, method="topk")}
    with pytest.raises(ConfigError, match=r"row_pruning: layer 0 is cut over ranks by the model's own code"):
        start(settings(rows), nets[1], mpu=mpu)
    mpu.free()


@pytest.mark.ranks(2, 4)
def test_layers_tied_over_stages_have_their_scores_in_common(comm):
    section = {
        "sparse_pruning": given.technique(["tied"], {"dense_ratio": 0.5}, method="topk"),
        **given.bits(6, 6, 1, ["tied", "1"], quantize_weight_in_forward=True),
    }
    found = []
    for stages in (1, 2):
        tied = [TiedLayerSpec("both", nn.Linear, 6, 6, dtype=torch.float64) for _ in range(2)]
        net = PipelineModule(
            [tied[0], LayerSpec(nn.Linear, 6, 6, dtype=torch.float64), tied[1]],
            num_stages=stages, loss_fn=nn.functional.mse_loss, seed_layers=True, partition_method="uniform",
        )  # fmt: skip
        engine = start(settings(section, 1), net)
        share = BATCH // engine.mesh["data"].size
        first = engine.mesh.index("data") * share
        x = torch.randn(3, 2, BATCH, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        losses = [float(engine.train_batch(iter([tuple(both[:, first : first + share])]))) for both in x]
        scores = engine.module.tied_modules["both"].sparse_scores
        assert all(torch.equal(scores, other) for other in comm.gather_objects(scores.detach()))
        found.append((losses, scores.detach().clone()))
        engine.destroy()
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
    assert_near(found[1][1], found[0][1], 1e-9)
