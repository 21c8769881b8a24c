"""One transformers model with experts, trained by ours, by torch's DDP, by transformers and by DeepSpeed.

All have the same weights, the same tokens and AdamW (torch's; ours: the engine's), in fp32.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import ALL_PARALLEL_STYLES, apply_expert_parallelism
from transformers.integrations import moe as hf_moe

from mpispeed.nn.expert import RoutedExperts, Router, RouterOptions, SwiGLUExperts

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
import peers

SIZES = {  # layers, heads, width, width of an expert, vocabulary
    "60m": (12, 8, 512, 1536, 8192),
    "tiny": (4, 2, 64, 96, 256),
}
EXPERTS, CHOICES = 8, 2

Step = Callable[[], float]


def config(size: str) -> Any:
    """Qwen3-MoE with experts in every other layer, whose weights are divided by their sum."""
    layers, heads, width, expert, vocabulary = SIZES[size]
    return transformers.Qwen3MoeConfig(
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads, head_dim=width // heads,
        hidden_size=width, intermediate_size=expert, moe_intermediate_size=expert, vocab_size=vocabulary,
        num_experts=EXPERTS, num_experts_per_tok=CHOICES, decoder_sparse_step=2, norm_topk_prob=True,
        tie_word_embeddings=True, max_position_embeddings=peers.LENGTH, use_cache=False,
    )  # fmt: skip


def parameters(size: str) -> dict[str, int]:
    """Numbers of parameters: all, those of experts, and those that a token meets."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config(size))
    everything = sum(param.numel() for param in model.parameters())
    experts = sum(param.numel() for block in sparse_blocks(model) for param in block.experts.parameters())
    return {"all": everything, "experts": experts, "active": everything - experts * (EXPERTS - CHOICES) // EXPERTS}


def sparse_blocks(model: Any) -> list[Any]:
    """The modules of transformers that have a router and experts."""
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def make(name: str, folder: str, ids: torch.Tensor, ranks: int) -> tuple[Step, Step]:
    """A contender's training step and its loss without training, from the weights in a folder.

    Collective over: all ranks.
    """
    maker = {"ddp": _make_ddp, "all_to_all": _make_transformers, "deepspeed": _make_deepspeed}.get(name)
    return maker(folder, ids, ranks) if maker else _make_ours(name, folder, ids, ranks)


def load(folder: str, **more: Any) -> Any:
    """The model of a folder, for training."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more)
    return model.train()


def _loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


# -- clocks ------------------------------------------------------------------------------------------------------------


class Clock:
    """Time between two places of a graph, forward and backward. Units: seconds; without meaning inside of a pass."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        """Count what follows in forward, until the end; in backward until here."""
        marked: torch.Tensor = _Mark.apply(x, self, -1)
        return marked

    def end(self, x: torch.Tensor) -> torch.Tensor:
        """The other place."""
        marked: torch.Tensor = _Mark.apply(x, self, 1)
        return marked

    def around(self, module: nn.Module) -> None:
        """Time the calls of a module, whose first argument and only result are tensors."""
        forward = module.forward

        def timed(x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
            return self.end(forward(self.begin(x), *rest, **named))

        module.forward = timed  # type: ignore[method-assign]


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock, sign: int) -> torch.Tensor:
        ctx.clock, ctx.sign = clock, sign
        clock.seconds += sign * time.perf_counter()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.clock.seconds -= ctx.sign * time.perf_counter()
        return grad, None, None


LAYERS, PRODUCTS = Clock(), Clock()
"""Of whichever contender runs: its layers of experts, from their input to their output and back; in them what experts
compute, which is two products and the activation between them."""


def time_grouped_products() -> None:
    """Time transformers' experts from the input of their first product to the output of their second."""
    product, calls = hf_moe._grouped_linear, [0]

    def timed(rows: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] % 2:
            return product(PRODUCTS.begin(rows), *rest, **named)
        return PRODUCTS.end(product(rows, *rest, **named))

    hf_moe._grouped_linear = timed


# -- torch and transformers --------------------------------------------------------------------------------------------


def _make_ddp(folder: str, ids: torch.Tensor, _ranks: int) -> tuple[Step, Step]:
    """All experts on every rank."""
    model = load(folder)
    for block in sparse_blocks(model):
        LAYERS.around(block)
    return _torch_steps(DistributedDataParallel(model, gradient_as_bucket_view=True), ids, fused=True)


def _make_transformers(folder: str, ids: torch.Tensor, ranks: int) -> tuple[Step, Step]:
    """Its own expert parallelism; it needs the rest of the model to be cut by FSDP2."""
    layout = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="all_to_all")
    model = load(folder, distributed_config=layout)
    for block in sparse_blocks(model):
        LAYERS.around(block)
    return _torch_steps(model, ids, fused=True)


def _torch_steps(model: Any, ids: torch.Tensor, *, fused: bool) -> tuple[Step, Step]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused, **peers.ADAM)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = _loss_of(model, ids)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step, _evaluated(model, ids)


def _evaluated(model: Any, ids: torch.Tensor) -> Step:
    @torch.no_grad()
    def loss() -> float:
        return float(_loss_of(model, ids))

    return loss


def transformers_block(size: str, mesh: Any) -> nn.Module:
    """One block on its expert parallelism, without experts' computation: what comes to them goes back.

    `mesh` has the dims "ep" and "tp", the latter of size 1. Collective over: all ranks.
    """
    block = _plain_block(size)
    hf_moe._grouped_linear = lambda rows, *_, **__: rows
    block.experts._apply_gate = lambda rows: rows
    plan = {"experts.gate_up_proj": "grouped_gemm", "experts.down_proj": "grouped_gemm"}
    plan["experts"] = "ep_dispatch_experts"
    assert all(style in ALL_PARALLEL_STYLES for style in plan.values())
    made: nn.Module = apply_expert_parallelism(block, mesh["ep"], mesh["tp"], plan, "all_to_all")
    return made


def _plain_block(size: str) -> Any:
    made = config(size)
    made.num_hidden_layers, made._experts_implementation = 2, "grouped_mm"
    torch.manual_seed(3)
    (block,) = sparse_blocks(transformers.AutoModelForCausalLM.from_config(made))
    return block


# -- ours --------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Our layer in the place of transformers' block, which returns the output alone."""

    def __init__(self, block: Any, ep_size: int) -> None:
        super().__init__()
        width, inner = block.experts.hidden_dim, block.experts.intermediate_dim
        router, experts = Router(width, EXPERTS, RouterOptions(k=CHOICES)), SwiGLUExperts(width, inner, EXPERTS)
        router.wg.weight.data.copy_(block.gate.weight.data)
        experts.gate_up_proj.data.copy_(block.experts.gate_up_proj.data)
        experts.down_proj.data.copy_(block.experts.down_proj.data)
        self.routed = RoutedExperts(router, experts, ep_size=ep_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        output: torch.Tensor = self.routed(x)[0]
        return output


def our_model(folder: str, ep_size: int) -> Any:
    """The model with our layers."""
    model = load(folder)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp = Block(layer.mlp, ep_size)
            LAYERS.around(layer.mlp)
            PRODUCTS.around(layer.mlp.routed.experts)
    return model


def _make_ours(name: str, folder: str, ids: torch.Tensor, ranks: int) -> tuple[Step, Step]:
    """`name` is "stage" and a ZeRO stage."""
    return _engine_steps(peers.make_engine(our_model(folder, ranks), ranks * len(ids), {"stage": int(name[-1])}), ids)


def _engine_steps(engine: Any, ids: torch.Tensor) -> tuple[Step, Step]:
    def step() -> float:
        loss = _loss_of(engine, ids)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step, _evaluated(engine, ids)


def our_block(size: str, comm: Any) -> nn.Module:
    """One block on its expert-parallel group, without experts' computation. Collective over: `comm`."""
    block = Block(_plain_block(size), comm.size)
    block.routed.set_expert_group(comm)
    block.routed.experts.forward = lambda rows, _counts: rows
    return block


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


class SwiGLU(nn.Module):
    """One expert."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: [..., width] in and out."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class DeepSpeedBlock(nn.Module):
    """DeepSpeed's layer in the place of transformers' block."""

    def __init__(self, block: Any, ranks: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        width, inner = block.experts.hidden_dim, block.experts.intermediate_dim
        options = {"drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False}
        self.moe = MoE(width, SwiGLU(width, inner), EXPERTS, ep_size=ranks, k=CHOICES, **options)
        self.moe.deepspeed_moe.gate.wg.weight.data.copy_(block.gate.weight.data)
        first = EXPERTS // ranks * torch.distributed.get_rank()
        for number, expert in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts, first):
            expert.gate_up.weight.data.copy_(block.experts.gate_up_proj.data[number])
            expert.down.weight.data.copy_(block.experts.down_proj.data[number])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        output: torch.Tensor = self.moe(x)[0]
        return output


def _make_deepspeed(folder: str, ids: torch.Tensor, ranks: int) -> tuple[Step, Step]:
    """Its layer and its engine at stage 2."""
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split_groups

    deepspeed.init_distributed("gloo")
    model = load(folder)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp = DeepSpeedBlock(layer.mlp, ranks)
            LAYERS.around(layer.mlp)
            PRODUCTS.around(layer.mlp.moe.deepspeed_moe.experts)
    groups = split_groups({"params": list(model.parameters()), "name": "all"})
    settings = {
        "train_micro_batch_size_per_gpu": len(ids),
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # else it clips at 1
    }
    optimizer = torch.optim.AdamW(groups, fused=True, **peers.ADAM)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return _engine_steps(engine, ids)
