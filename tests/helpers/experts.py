"""A layer of experts against one process that loops over all experts."""

import copy
import itertools

import torch
from torch import nn
from torch.nn import functional as F

from mpispeed.nn.expert import ExpertModules, MLPExperts, RoutedExperts, Router, RouterOptions, SwiGLUExperts

HIDDEN, INNER = 6, 5


class Block(nn.Module):
    """An expert that returns a tuple, as some do."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))), "more"


KINDS = {
    "modules": lambda experts: ExpertModules(Block(), experts),
    "swiglu": lambda experts: SwiGLUExperts(HIDDEN, INNER, experts),
    "mlp": lambda experts: MLPExperts(HIDDEN, INNER, experts),
}


def whole_layer(kind, experts, k, *, shared=False, **options):
    """A layer with all experts, no two of them alike."""
    torch.manual_seed(experts + k)
    made = KINDS[kind](experts)
    gate = Router(HIDDEN, experts, RouterOptions(k=k, **options))
    layer = RoutedExperts(gate, made, nn.Linear(HIDDEN, HIDDEN) if shared else None)
    with torch.no_grad():
        for param in layer.parameters():
            param.uniform_(-1, 1)
    return layer


def tokens_of(counts, seed=0):
    """Inputs of ranks with so many tokens each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, HIDDEN, generator=generator) for count in counts]


def expert_output(experts, number, rows):
    """What one expert makes of rows."""
    if isinstance(experts, ExpertModules):
        return experts.deepspeed_experts[number](rows)[0]
    if isinstance(experts, SwiGLUExperts):
        gate, up = (rows @ experts.gate_up_proj[number].t()).chunk(2, -1)
        return (F.silu(gate) * up) @ experts.down_proj[number].t()
    inner = F.gelu(rows @ experts.up_proj[number].t() + experts.up_bias[number])
    return inner @ experts.down_proj[number].t() + experts.down_bias[number]


def looped(layer, x):
    """The layer's output by a loop over all experts and choices, and the routing."""
    routing = layer.gate(x)
    outputs = torch.stack([expert_output(layer.experts, number, x) for number in range(layer.experts.num_experts)])
    y = torch.zeros_like(x)
    for token, choice in itertools.product(range(len(x)), range(routing.experts.shape[1])):
        row = F.one_hot(torch.tensor(token), len(x))[:, None]
        y = y + row * routing.weights[token, choice] * outputs[routing.experts[token, choice], token]
    return y if layer.shared is None else y + layer.shared(x), routing


def loss_of(y, routing):
    """A loss that all outputs and the router take part in."""
    return (y.sin() * 3).sum() + routing.balance_loss + 0.1 * routing.z_loss + 0.1 * routing.sequence_loss


def reference(layer, inputs):
    """Outputs, input gradients and gates' gradients of each rank, and gradients of experts of all, in one process."""
    found, total = [], None
    for x in inputs:
        own, x = copy.deepcopy(layer), x.clone().requires_grad_()
        y, routing = looped(own, x)
        loss_of(y, routing).backward()
        grads = {
            name: torch.zeros_like(param) if param.grad is None else param.grad
            for name, param in own.named_parameters()
        }
        found.append((y.detach(), x.grad, {name: grad for name, grad in grads.items() if not is_of_expert(name)}))
        experts = {name: grad for name, grad in grads.items() if is_of_expert(name)}
        total = experts if total is None else {name: total[name] + grad for name, grad in experts.items()}
    return found, total


def is_of_expert(name):
    """True for parameters of routed experts."""
    return name.startswith("experts.")


def own_part(name, whole, layer):
    """The gradient in `whole` that belongs to a parameter of a layer that holds part of the experts."""
    if isinstance(layer.experts, ExpertModules):
        return whole[name]
    return whole[name][layer.experts.held.start : layer.experts.held.stop]
