"""Pipeline modules on simulated ranks: who has which layers, names, sizes, what is refused."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

from mpispeed.base.errors import StageError, TopologyError, UsageError
from mpispeed.mesh import sim
from mpispeed.pipe import (
    LayerSpec,
    PipeDataParallelTopology,
    PipelineModule,
    PipelineParallelGrid,
    TiedLayerSpec,
    spread,
)
from mpispeed.pipe.counting import count_parameters
from mpispeed.pipe.layers import read_layers
from tests.unit.pipe.staged import Block, Table, as_head, names, staged


def specs(count=6):
    return [LayerSpec(Block, number) for number in range(count)]


def run_through(modules_of, layers, x, **settings):
    """Output of the model, with the virtual stages run one after the other."""
    found = staged(layers, lambda module: [module.chunk(c) for c in range(module.num_chunks)], modules_of, **settings)
    chunks = sorted((chunk for chunks in found for chunk in chunks), key=lambda chunk: chunk.virtual_stage)
    for chunk in chunks:
        x = chunk(x)
    return x


def test_only_local_layers_are_built():
    built = []

    class Noted(Block):
        def __init__(self, number):
            super().__init__(number)
            if self.weight.device.type != "meta":
                built.append(number)

    def use(module):
        return module.parts, names(module), [module.stage_owner(layer) for layer in range(5)]

    layers = [LayerSpec(Noted, number) for number in range(5)]
    first, second = staged(layers, use, partition_method="uniform")
    assert sorted(built) == [0, 1, 2, 3, 4]
    assert first[0] == second[0] == [0, 3, 5]
    assert first[1] == [f"{i}.{name}" for i in range(3) for name in ("bias", "weight")]
    assert second[1] == [f"{i}.{name}" for i in range(3, 5) for name in ("bias", "weight")]
    assert first[2] == second[2] == [0, 0, 0, 1, 1]


def test_counting_parameters_needs_no_memory_and_leaves_the_generator_alone():
    devices = []

    class Noted(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(width))
            devices.append((self.weight.device.type, width))

        def forward(self, x):
            return x

    torch.manual_seed(3)
    state = torch.get_rng_state()
    layers = [LayerSpec(Noted, 100), LayerSpec(Noted, 10), LayerSpec(Noted, 10), LayerSpec(Noted, 80)]
    assert staged(layers, lambda module: module.parts) == [[0, 1, 4]] * 2
    assert torch.equal(torch.get_rng_state(), state)
    assert sorted(width for kind, width in devices if kind == "cpu") == [10, 10, 80, 100]


def test_a_layer_that_cannot_be_built_without_memory_is_counted_all_the_same():
    class Reads(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))
            self.total = self.weight.sum().item()

        def forward(self, x):
            return x

    assert staged([LayerSpec(Reads, width) for width in (9, 1, 1, 7)], lambda module: module.parts) == [[0, 1, 4]] * 2


IMPORTS = """
import sys
import torch
from torch import nn
from mpispeed.pipe.counting import count_parameters
from mpispeed.pipe.layers import LayerSpec, read_layers

class Rotary(nn.Linear):
    def __init__(self, width):
        super().__init__(width, 5)
        angles = torch.outer(torch.arange(7), 10.0 ** (-torch.arange(0, width, 2) / width))
        self.register_buffer("rotation", torch.stack([angles.cos(), angles.sin()]))

specs = [LayerSpec(nn.Embedding, 8, 4), LayerSpec(Rotary, 6), LayerSpec(nn.TransformerEncoderLayer, 8, 2)]
sys.exit(not (count_parameters(read_layers(specs))[:2] == [32, 35] and "torch._dynamo" not in sys.modules))
"""


def test_counting_does_not_import_the_compiler_of_torch():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_range_added_to_a_parameter_needs_no_memory():
    class Numbered(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(width) + torch.arange(width))
            kinds.append(self.weight.device.type)

    kinds = []
    assert count_parameters(read_layers([LayerSpec(Numbered, 9)])) == [9]
    assert kinds == ["meta"]


def test_frozen_parameters_do_not_count():
    def layers():
        blocks = [Block(number) for number in range(4)]
        blocks[0].requires_grad_(False)
        return blocks

    assert staged(layers, lambda module: module.parts)[0] == [0, 3, 4]
    assert staged(layers, lambda module: module.parts, partition_method="type:block")[0] == [0, 2, 4]


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (4, 3)])
def test_names_and_outputs_do_not_depend_on_the_stages(stages, chunks):
    layers = [TiedLayerSpec("table", Table), *specs(5), torch.tanh, TiedLayerSpec("table", Table, forward_fn=as_head)]
    tokens = torch.tensor([[1, 2, 7]])
    table, blocks = Table(), [Block(number) for number in range(5)]
    expected = as_head(table, torch.tanh(nn.Sequential(*blocks)(table(tokens))))
    assert torch.equal(run_through(stages, layers, tokens, num_chunks=chunks), expected)
    found = staged(layers, names, stages, num_chunks=chunks)
    wanted = {f"{i}.{name}" for i in range(1, 6) for name in ("weight", "bias")}
    assert set().union(*found) == wanted | {"tied_modules.table.weight", "tied_modules.table.scale"}


def test_chunks_are_dealt_in_turn():
    def use(module):
        chunks = [module.chunk(index) for index in range(2)]
        assert module.chunk(1) is chunks[1]
        facts = [(chunk.virtual_stage, chunk.first, chunk.stop, chunk.is_first, chunk.is_last) for chunk in chunks]
        with pytest.raises(UsageError, match="no chunk 2"):
            module.chunk(2)
        with pytest.raises(UsageError, match="cannot run in one go"):
            module(torch.zeros(1, 4))
        return facts, [module.stage_owner(layer) for layer in range(7)], module.partitions()

    first, second = staged(specs(7), use, num_chunks=2, partition_method="uniform")
    assert first[0] == [(0, 0, 2, True, False), (2, 4, 6, False, False)]
    assert second[0] == [(1, 2, 4, False, False), (3, 6, 7, False, True)]
    assert first[1] == second[1] == [0, 0, 1, 1, 0, 0, 1]
    assert first[2] == [0, 2, 4, 6, 7]


def test_a_plain_sequential_and_its_state_dict():
    plain = nn.Sequential(*[Block(number) for number in range(4)])
    x = torch.randn(2, 4)
    assert torch.equal(run_through(2, plain, x), plain(x))
    found = staged(plain, lambda module: module.state_dict())
    assert {name for part in found for name in part} == set(plain.state_dict())
    (whole,) = staged(plain, lambda module: (module(x), names(module)), stages=1)
    assert torch.equal(whole[0], plain(x))
    assert whole[1] == sorted(plain.state_dict())


def test_more_stages_than_layers():
    def use(module):
        x = torch.ones(1, 4)
        return module.parts, len(names(module)), module(x) is x

    found = staged(specs(2), use, stages=4)
    assert [part[0] for part in found] == [[0, 1, 2, 2, 2]] * 4
    assert [part[1] for part in found] == [2, 2, 0, 0]
    assert [part[2] for part in found] == [False, False, True, True]


def test_modules_of_other_stages_are_let_go():
    def fn(world):
        grid = PipelineParallelGrid(PipeDataParallelTopology(2, 1), world)
        layers = [Block(number) for number in range(4)]
        seen = [(number, weakref.ref(block)) for number, block in enumerate(layers)]
        module = PipelineModule(layers, grid=grid)
        layers.clear()
        gc.collect()
        return [number for number, block in seen if block() is not None], len(list(module.parameters()))

    assert sim.run(2, fn) == [([0, 1], 4), ([2, 3], 4)]


def test_a_stage_without_layers_is_warned_of(caplog):
    staged(specs(1), names)
    (record,) = [record for record in caplog.records if record.name == "mpispeed.pipe.module"]
    assert record.levelname == "WARNING"
    assert "stage 0: layers 0 to 0: Block\nstage 1: no layers, hands its input on" in record.getMessage()
    caplog.clear()
    with caplog.at_level("INFO"):
        staged(specs(5), names, num_chunks=2, partition_method="uniform")
    (record,) = [record for record in caplog.records if record.name == "mpispeed.pipe.module"]
    assert record.levelname == "INFO"
    assert record.getMessage().splitlines() == [
        "5 layers on 2 stages",
        "stage 0 chunk 0: layers 0 to 1: 2 x Block",
        "stage 1 chunk 0: layers 2 to 2: Block",
        "stage 0 chunk 1: layers 3 to 3: Block",
        "stage 1 chunk 1: layers 4 to 4: Block",
    ]


def test_layers_of_a_stage_and_of_parameters():
    def use(module):
        for layer in (-1, 3):
            with pytest.raises(TopologyError, match="no layer"):
                module.stage_owner(layer)
        return {name: module.layer_of(name) for name in names(module)}

    layers = [LayerSpec(Block, 0), TiedLayerSpec("t", Table), TiedLayerSpec("t", Table, forward_fn=as_head)]
    first, second = staged(layers, use, loss_fn=nn.Linear(2, 1), partition_method="uniform")
    tied = {"tied_modules.t.scale": 1, "tied_modules.t.weight": 1}
    assert first == {"0.bias": 0, "0.weight": 0, **tied}
    assert second == {"loss_fn.bias": -1, "loss_fn.weight": -1, **tied}


def test_parameters_of_the_loss_are_on_the_last_stage():
    found = staged(specs(2), lambda module: (names(module), module.loss_fn), loss_fn=nn.Linear(4, 1))
    assert found[0][0] == ["0.bias", "0.weight"]
    assert found[1][0] == ["1.bias", "1.weight", "loss_fn.bias", "loss_fn.weight"]
    assert all(isinstance(loss, nn.Linear) for _, loss in found)
    assert staged(specs(2), lambda module: module.loss_fn)[1] is None


def test_facts_under_the_names_of_deepspeed():
    def use(module):
        assert module.mpu() is module.grid
        assert module.topology().get_dim("data") == 2
        assert module.get_additional_losses() is None
        return module.num_pipeline_stages(), module.num_stages, module.stage_id, module.dynamic_shape

    assert staged(specs(4), use, stages=2, copies=2, dynamic_shape=True) == [
        (2, 2, stage, True) for stage in (0, 0, 1, 1)
    ]


def test_several_inputs():
    class Attend(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.block = Block(number)

        def forward(self, hidden, mask):
            return self.block(hidden) * mask, mask

    first = Attend(0)
    layers = [spread(first), LayerSpec(Attend, 1, spreads_inputs=True), lambda pair: pair[0]]
    hidden, mask = torch.randn(2, 4), torch.tensor([[True], [False]])
    expected = Block(1)(Block(0)(hidden) * mask) * mask
    assert torch.equal(run_through(2, layers, (hidden, mask)), expected)
    found = staged(layers, names, partition_method="uniform")
    assert found[0] == ["0.block.bias", "0.block.weight", "1.block.bias", "1.block.weight"]


def test_replaced_modules_are_run():
    def use(module):
        module.add_module("0", nn.Identity())
        x = torch.ones(1, 4)
        return module(x) is x

    assert staged(specs(1), use, stages=1) == [True]


def test_layers_are_compiled_one_by_one():
    class Compiled(Block):
        def compile(self, *args, **kwargs):
            self.compiled = (args, kwargs)

    def use(module):
        module.compile(dynamic=True)
        return [getattr(layer, "compiled", None) for _, layer in sorted(module.named_children())]

    settings = {"partition_method": "uniform", "num_chunks": 2}
    layers = [TiedLayerSpec("t", Compiled, 0), *[LayerSpec(Compiled, number) for number in range(3)]]
    done = ((), {"dynamic": True})
    assert staged(layers, use, **settings) == [[done, None], [done, done, None]]
    (whole,) = staged(layers, lambda module: module.compile() or module.tied_modules["t"].compiled, stages=1)
    assert whole == ((), {})


def test_files_of_layers_are_named_as_in_deepspeed(tmp_path):
    for name in ("layer_03-model_states.pt", "layer_03-model_00-model_states.pt", "layer_13-model_states.pt"):
        (tmp_path / name).touch()

    def use(module):
        with pytest.raises(UsageError, match=r"local_layer_idx=3: stage \d has 3 layers"):
            module.ckpt_layer_path("here", 3)
        for refused in (module.save_state_dict, module.load_state_dir):
            with pytest.raises(UsageError, match="no files of their own"):
                refused("here")
        found = [path.rpartition("/")[2] for path in module.ckpt_layer_path_list(str(tmp_path), 0)]
        return module.ckpt_prefix("here", "step5"), module.ckpt_layer_path("here", 1), found

    assert staged(specs(6), use) == [
        ("here/step5/module-pipe_00", "here/layer_01-model_states.pt", []),
        (
            "here/step5/module-pipe_01",
            "here/layer_04-model_states.pt",
            ["layer_03-model_00-model_states.pt", "layer_03-model_states.pt"],
        ),
    ]


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"checkpointable_layers": ("Block",)}, "has to be a list of class names"),
        ({"activation_checkpoint_interval": -1}, "activation_checkpoint_interval=-1"),
        ({"num_chunks": 0}, "num_chunks=0"),
        ({"num_stages": 3}, "num_stages=3, but the topology has 2 stages"),
        ({"topology": PipeDataParallelTopology(2, 1)}, "give one of the two"),
        ({"partition_method": "magic"}, "'magic' is unknown"),
        ({"partition_method": "type:attention"}, "matches no layer"),
        ({"partition_method": "profile"}, "pass profile_input="),
        ({"partition_method": 7}, "partition_method=7"),
    ],
)
def test_settings_that_are_refused(settings, text):
    with pytest.raises(StageError, match=text) as raised:
        staged(specs(4), lambda module: module, **settings)
    assert isinstance(raised.value, RuntimeError | AssertionError)


def test_chunks_need_stages():
    with pytest.raises(StageError, match="that needs 2 stages, there is 1"):
        staged(specs(4), lambda module: module, stages=1, num_chunks=2)


def test_a_number_of_stages_is_needed():
    with pytest.raises(RuntimeError, match="give num_stages, or a topology"):
        PipelineModule(specs(2))


def test_a_pipeline_is_no_layer():
    def fn(world):
        grid = PipelineParallelGrid(PipeDataParallelTopology(1, 1), world)
        inner = PipelineModule(specs(1), grid=grid)
        with pytest.raises(RuntimeError, match="cannot be a layer of another"):
            PipelineModule([inner], grid=grid)

    sim.run(1, fn)


def test_a_layer_that_fails_on_one_stage_fails_on_all():
    class Broken(Block):
        def __init__(self, number):
            super().__init__(number)
            if number == 3 and self.weight.device.type != "meta":
                raise MemoryError(number)

    def fn(world):
        grid = PipelineParallelGrid(PipeDataParallelTopology(2, 1), world)
        with pytest.raises(
            StageError, match=r"rank 1 of 2: layer 3 \(Broken\) cannot be built: MemoryError: 3"
        ) as raised:
            PipelineModule([LayerSpec(Broken, number) for number in range(4)], grid=grid, partition_method="uniform")
        cause = raised.value.__cause__
        return cause and type(cause.__cause__)

    assert sim.run(2, fn) == [None, MemoryError]


def test_ranks_with_other_layers_are_told():
    def fn(world):
        grid = PipelineParallelGrid(PipeDataParallelTopology(2, 1), world)
        layers = specs(4) if world.rank == 0 else [*specs(3), nn.Identity()]
        with pytest.raises(StageError, match="rank 1 of 2: PipelineModule: other layers than on rank 0"):
            PipelineModule(layers, grid=grid, partition_method="uniform")
        return True

    assert sim.run(2, fn) == [True, True]


def test_a_parameter_on_two_stages_has_to_be_tied():
    def layers():
        shared = Block(0)
        return [shared, Block(1), shared]

    with pytest.raises(StageError, match=r"layers 0 and 2 share the parameter 'weight' but are on the stages 0 and 1"):
        staged(layers, names)
    assert staged(layers, names, stages=1) == [["0.bias", "0.weight", "1.bias", "1.weight"]]
