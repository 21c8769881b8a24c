"""Quantization of the layers of a model, all at once or one after the other."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.inference.quantized.choice import choose
from mpispeed.inference.quantized.experts import quantize_experts
from mpispeed.inference.quantized.layers import coded_buffers, quantize_module, share
from mpispeed.inference.quantized.options import QuantOptions
from mpispeed.mesh.comm import Comm


@dataclass(slots=True)
class Report:
    """Result of the quantization of a model.

    Attributes:
        quantized: path of each layer -> how.
        whole: path of each other linear layer or embedding -> why it is not.
        bytes_before: of the weights of the quantized layers on this rank. Units: bytes.
        bytes_after: of their codes, scales and offsets. Units: bytes.
    """

    quantized: dict[str, str] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0

    def __str__(self) -> str:
        size = f"{self.bytes_before / 2**20:.1f} MiB of weights became {self.bytes_after / 2**20:.1f} MiB on this rank"
        lines = [f"{len(self.quantized)} layers quantized, {len(self.whole)} left whole; {size}"]
        lines += [f"  {path}: {how}" for path, how in self.quantized.items()]
        return "\n".join(lines + [f"  {path}: whole ({why})" for path, why in self.whole.items()])


class Quantizer:
    """Quantizes layers of a model when they have their values, so that no more than a few are whole at a time.

    Args:
        model: may be without values yet. Its layers are chosen here.
        options: which layers, and how.

    Raises:
        ConfigError: a layer matches two names, a name matches no layer, groups do not divide a size, or no layer is
            left.

    Attributes:
        report: of what was done so far.
    """

    def __init__(self, model: nn.Module, options: QuantOptions) -> None:
        self._model = model
        self._choice = choose(model, options)
        if not self.paths:
            some = next(iter(self._choice.whole.items()), None)
            msg = "quantization: the model has no layer for it" + (f"; {some[0]} is whole: {some[1]}" if some else "")
            raise ConfigError(msg)
        self.report = Report(whole=dict(self._choice.whole))

    @property
    def paths(self) -> list[str]:
        """Layers that are still to be quantized, in the order of the model."""
        return [*self._choice.formats, *self._choice.same, *self._choice.experts]

    def finish(self, path: str) -> bool:
        """Quantize the layer or the experts at `path`, in place, if chosen and not yet done; true if so.

        A layer that shares its weight with an earlier one is quantized with that.
        """
        how, experts = self._choice.formats.pop(path, None), self._choice.experts.pop(path, None)
        if how is None and experts is None:
            return False
        layer = self._model.get_submodule(path)
        bias = layer._parameters.get("bias")
        self.report.bytes_before += sum(p.nbytes for p in layer.parameters(recurse=False) if p is not bias)
        if how is not None:
            quantize_module(layer, how, path)
            self.report.quantized[path] = str(how)
        elif experts is not None:
            quantize_experts(layer, experts, path)
            self.report.quantized |= {f"{path}.{name}": str(each) for name, each in experts.items()}
        self.report.bytes_after += sum(layer.get_buffer(name).nbytes for name in coded_buffers(layer))
        for other in [other for other, first in self._choice.same.items() if first == path]:
            del self._choice.same[other]
            share(self._model.get_submodule(other), layer)
            self.report.quantized[other] = f"the codes of {path}"
        return True

    def finish_rest(self) -> None:
        """Quantize all that is left, in the order of the model."""
        for path in self.paths:
            self.finish(path)


def quantize_model(model: nn.Module, options: QuantOptions, *, tensor: Comm | None = None) -> Report:
    """Quantize the weights of a model's layers, in place, one after the other.

    Norms, biases and routers of experts stay as they are; so do embeddings and layers outside of the blocks, such as
    the one to logits, unless `options` says otherwise. Layers that are sliced over ranks keep their sums and gathers.
    A model on meta gets layers without values, whose codes can be loaded.

    Args:
        model: sliced already, if it is to be.
        options: which layers, and how.
        tensor: the slicing group; None: one rank.

    Collective over: `tensor`.

    Raises:
        ConfigError: on all ranks, if a name matches no layer, two names match one, groups do not divide a size, or no
            layer is left.
    """
    with nullcontext() if tensor is None else tensor.together(ConfigError):
        quantizer = Quantizer(model, options)
    quantizer.finish_rest()
    return quantizer.report
