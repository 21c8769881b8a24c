"""Knowledge distillation: losses between a student and its teacher, and a teacher that need not fit on one rank.

Sources: Hinton et al., arXiv 1503.02531 (soft targets, temperature); Jiao et al., TinyBERT, arXiv 1909.10351 (hidden
states, attention); DeepSpeedExamples, compression/bert (which terms are summed).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from mpispeed.base.errors import UsageError
from mpispeed.inference.api import init_inference

_MASKED = -100.0
"""Attention scores up to this one belong to masked places; TinyBERT and DeepSpeedExamples take them for 0."""


def logits_loss(
    student: torch.Tensor, teacher: torch.Tensor, *, temperature: float = 1.0, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Kullback-Leibler divergence of the teacher's soft targets and the student's, times temperature ** 2; in nats.

    Gradients are those of the cross entropy with soft targets. The factor keeps their size at any temperature (Hinton
    et al., section 2). Of logits with one class, as in a regression, it is the mean squared difference.

    Args:
        student: [..., classes].
        teacher: [..., classes]; gets no gradient.
        temperature: divides the logits.
        mask: [...] of tokens or samples, 0 for those that do not count; all count by default.

    Returns:
        The mean over what counts, fp32, [].

    Raises:
        UsageError: shapes differ, or the temperature is not positive.
    """
    _require_equal("logits", student, teacher)
    if not temperature > 0:
        msg = f"distillation: the temperature is {temperature!r}, which logits are divided by; give more than 0"
        raise UsageError(msg)
    student, teacher = student.float() / temperature, teacher.detach().float() / temperature
    if student.shape[-1] == 1:
        return _mean((student - teacher) ** 2, mask) * temperature**2
    own, soft = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    each = F.kl_div(own, soft, reduction="none", log_target=True).sum(-1, keepdim=True)
    return _mean(each, mask) * temperature**2


def hidden_loss(
    student: Sequence[torch.Tensor],
    teacher: Sequence[torch.Tensor],
    *,
    projection: nn.Module | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over layers of the mean squared difference of hidden states (TinyBERT, equations 8 and 9).

    Args:
        student: one [batch, length, width] for each pair of layers.
        teacher: as many, [batch, length, width of the teacher]; get no gradient.
        projection: maps the student's width to the teacher's, the same for all layers.
        mask: [batch, length], 0 for tokens that do not count.

    Returns:
        fp32, [].

    Raises:
        UsageError: numbers of layers or shapes differ.
    """
    total = torch.zeros(())
    for own, other in _paired("hidden states", student, teacher):
        mapped = own if projection is None else projection(own)
        _require_equal("hidden states", mapped, other, "; give DistillationLoss both widths, for a projection")
        total = total.to(own.device) + _mean((mapped.float() - other.detach().float()) ** 2, mask)
    return total


def attention_loss(
    student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor], *, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum over layers of the mean squared difference of attention maps (TinyBERT, equation 7).

    Maps are scores before the softmax, as in the paper, where masked ones (-100 and less) count as 0; or
    probabilities, as models of transformers return them.

    Args:
        student: one [batch, heads, length, length] for each pair of layers.
        teacher: as many, of the same shape; get no gradient.
        mask: [batch, length], 0 for tokens whose rows do not count.

    Returns:
        fp32, [].

    Raises:
        UsageError: numbers of layers, heads or other sizes differ.
    """
    total = torch.zeros(())
    for own, other in _paired("attention maps", student, teacher):
        _require_equal("attention maps", own, other, "; numbers of heads have to be equal")
        first, second = (maps.float().masked_fill(maps <= _MASKED, 0.0) for maps in (own, other.detach()))
        rows = None if mask is None else _expanded(mask[:, None], own.shape[:-1])
        total = total.to(own.device) + _mean((first - second) ** 2, rows)
    return total


class DistillationLoss(nn.Module):
    """Weighted sum of `logits_loss`, `hidden_loss` and `attention_loss` of what a student and its teacher return.

    Called with two outputs of transformers' models, mappings with the same names, or logits alone. The teacher's
    hidden states and maps are those after the layers of `teacher_layers`; hidden states begin with the embeddings,
    which are paired too. Make it a part of the student (`student.distillation = DistillationLoss(...)`) before
    `initialize` if it has a projection, so that this is trained and saved with it.

    Attributes:
        projection: from the student's width to the teacher's, or None.
    """

    def __init__(
        self,
        *,
        logits: float = 1.0,
        hidden: float = 0.0,
        attention: float = 0.0,
        temperature: float = 1.0,
        teacher_layers: Sequence[int] | None = None,
        widths: tuple[int, int] | None = None,
    ) -> None:
        """Args say what is summed; a term with the weight 0 is not computed.

        Args:
            logits: weight of `logits_loss`.
            hidden: weight of `hidden_loss`; models have to return `hidden_states`.
            attention: weight of `attention_loss`; models have to return `attentions`.
            temperature: of the logits.
            teacher_layers: the teacher's layer for each one of the student, as `teacher_layer` of `layer_reduction`; by
                default the last layer of each of equal blocks.
            widths: of the student's and the teacher's hidden states, if they differ: a linear map is learned.
        """
        super().__init__()
        self._weights = {"logits": logits, "hidden_states": hidden, "attentions": attention}
        self._temperature, self._layers = temperature, None if teacher_layers is None else list(teacher_layers)
        self.projection = None if widths is None else nn.Linear(*widths, bias=False)

    def forward(self, student: Any, teacher: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
        """The sum, fp32, []; `mask` is that of the losses."""
        terms = self.terms(student, teacher, mask)
        return torch.stack([self._weights[name] * term for name, term in terms.items()]).sum()

    def terms(self, student: Any, teacher: Any, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The losses without weights, by "logits", "hidden_states" and "attentions", as far as they have a weight.

        Raises:
            UsageError: an output lacks one of them, or shapes do not fit.
        """
        terms: dict[str, torch.Tensor] = {}
        for name in (name for name, weight in self._weights.items() if weight):
            own, other = _part(student, name, "student"), _part(teacher, name, "teacher")
            if name == "logits":
                # Logits of whole texts have no tokens to leave out.
                fitting = None if mask is None or mask.dim() >= own.dim() else mask
                terms[name] = logits_loss(own, other, temperature=self._temperature, mask=fitting)
            elif name == "hidden_states":
                layers = self._layers_of(len(own) - 1, len(other) - 1)
                others = [other[0], *(other[layer + 1] for layer in layers)]
                terms[name] = hidden_loss(own, others, projection=self.projection, mask=mask)
            else:
                others = [other[layer] for layer in self._layers_of(len(own), len(other))]
                terms[name] = attention_loss(own, others, mask=mask)
        if not terms:
            msg = "DistillationLoss: all weights are 0; give logits, hidden or attention a weight"
            raise UsageError(msg)
        return terms

    def _layers_of(self, own: int, others: int) -> list[int]:
        """The teacher's layer for each of `own` layers, of `others`."""
        layers = self._layers
        if layers is None and 0 < own <= others:
            layers = [(i + 1) * others // own - 1 for i in range(own)]
        if layers is None or len(layers) != own or not all(0 <= layer < others for layer in layers):
            numbers = f"{own} layers of the student and {others} of the teacher"
            msg = f"DistillationLoss: teacher_layers {layers} do not fit {numbers}; name one for each of the student's"
            raise UsageError(msg)
        return layers


class Teacher:
    """A model that is only asked: in evaluation mode, without gradients, and in shards if it would not fit.

    It is no module, so a student may have it as an attribute without training or saving it.

    Attributes:
        engine: the engine of `init_inference`, which has the model.
    """

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        """As `mpispeed.init_inference(model, **settings)`; but the dtype of most of the model is the default.

        With `zero={"stage": 3}` each rank keeps a share of the parameters and gathers each layer when it runs; with
        `offload_param` there, in swap files. A model too large for a rank is built in `zero.Init`, or on torch's meta
        device and read by `checkpoint`. Make the teacher before the engine of the student.

        Args:
            model: the module; changed in place.
            settings: keys of `init_inference`, such as `zero`, `dtype`, `tensor_parallel`, `checkpoint`.

        Collective over: all ranks of the job.

        Raises:
            ConfigError: on every rank, as `init_inference` does.
        """
        if "dtype" not in settings and "config" not in settings:
            counts: Counter[torch.dtype] = Counter()
            for param in model.parameters():
                counts[param.dtype] += param.numel() if param.is_floating_point() else 0
            settings["dtype"] = counts.most_common(1)[0][0] if counts else torch.float32
        self.engine = init_inference(model, **settings)

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.engine.module

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the model returns, without gradients.

        Collective over: all ranks if the model is in shards, so ranks call it equally often, each with its own batch;
        the ranks that share layers if they do, with equal batches.
        """
        with torch.no_grad():
            return self.engine(*inputs, **kwargs)

    def destroy(self) -> None:
        """Give back what the engine has; parameters in shards have no values any more. Collective over: all ranks."""
        self.engine.destroy()


def _part(outputs: Any, name: str, whose: str) -> Any:
    found = outputs
    if isinstance(outputs, Mapping):
        found = outputs.get(name)
    elif not isinstance(outputs, torch.Tensor) or name != "logits":
        found = getattr(outputs, name, None)
    if found is None or (isinstance(found, tuple) and (not found or found[0] is None)):
        how = "" if name == "logits" else f"; call the model with output_{name}=True"
        how += ", and attn_implementation eager" if name == "attentions" else ""
        msg = f"DistillationLoss: the {whose} returns no {name}{how}"
        raise UsageError(msg)
    return found


def _paired(
    what: str, student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if len(student) != len(teacher):
        msg = f"distillation: {len(student)} {what} of the student, {len(teacher)} of the teacher; give pairs"
        raise UsageError(msg)
    return list(zip(student, teacher, strict=True))


def _require_equal(what: str, student: torch.Tensor, teacher: torch.Tensor, cure: str = "") -> None:
    if student.shape != teacher.shape:
        shapes = f"{list(student.shape)} of the student, {list(teacher.shape)} of the teacher"
        msg = f"distillation: {what} have the shapes {shapes}{cure}"
        raise UsageError(msg)


def _mean(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The mean of `values` [..., n] over what `mask` [...] does not rule out; 0 if that is nothing."""
    if mask is None:
        return values.mean()
    counts = _expanded(mask.to(values.dtype)[..., None], values.shape)
    return (values * counts).sum() / counts.sum().clamp(min=1)


def _expanded(mask: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A mask in the shape of what it is for."""
    try:
        return mask.expand(shape)
    except RuntimeError as failure:
        msg = f"distillation: a mask of shape {list(mask.shape)} does not fit {list(shape)}; give one number per token"
        raise UsageError(msg) from failure
