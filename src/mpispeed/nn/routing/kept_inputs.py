"""The inputs of a layer that sees some of the tokens: the attention mask, and what else runs over tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mpispeed.base.errors import UsageError
from mpispeed.native.token_drop import gather


@dataclass
class KeptTokens:
    """The tokens of a batch that a layer sees.

    Attributes:
        index: their places, int32 [B, K], ascending.
        tokens: tokens of a sample, S.
        batch_first: hidden states are [B, S, H], else [S, B, H].
        is_causal: attention masks that are common to all samples and heads are causal: their corner of K by K is what
            kept tokens see of each other. Of one sample a mask with its dim of samples is that sample's own.
        given: tensors that were replaced, by the identity of what replaces them; a layer may hand them on.
    """

    index: Tensor
    tokens: int
    batch_first: bool
    is_causal: bool
    given: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """Samples."""
        return self.index.shape[0]

    @property
    def count(self) -> int:
        """Tokens of a sample that are kept."""
        return self.index.shape[1]

    def mask(self, name: str, mask: Any) -> Any:
        """What kept tokens see of each other; None stays None.

        Raises:
            UsageError: it is no tensor, or of another shape than [B, S], [S, S], [B or 1, S or 1, S] and
                [B or 1, heads or 1, S or 1, S].
        """
        if mask is None:
            return None
        if not isinstance(mask, Tensor):
            msg = f"{name} is a {type(mask).__name__}; random-LTD picks tokens from masks that are tensors"
            raise UsageError(msg)
        shape, tokens = tuple(mask.shape), self.tokens
        if mask.dim() == 2 and self.batch != tokens and shape == (self.batch, tokens):
            return self._replaced(mask, gather(mask, self.index))
        if mask.dim() == 2 and self.batch != tokens and shape == (tokens, tokens) and self.is_causal:
            return self._replaced(mask, mask[: self.count, : self.count])
        is_known = mask.dim() in (3, 4) and shape[-1] == tokens and shape[-2] in (1, tokens)
        if not is_known or shape[0] not in (1, self.batch):
            msg = (
                f"{name} has shape {shape} for {self.batch} samples of {tokens} tokens; random-LTD knows "
                "[B or 1, heads or 1, S or 1, S] and [B or 1, S or 1, S], and where B is not S also [B, S] and "
                "[S, S], this if it is causal"
            )
            raise UsageError(msg)
        return self._replaced(mask, self._kept_pairs(mask))

    def _kept_pairs(self, mask: Tensor) -> Tensor:
        """Rows and columns of a mask [B or 1, ..., S or 1, S]."""
        has_rows = mask.shape[-2] == self.tokens
        is_common = self.batch > 1 and all(size == 1 for size in mask.shape[:-2])
        if self.is_causal and is_common and has_rows:
            return mask[..., : self.count, : self.count]
        places = self.index.long().view(self.batch, *(1 for _ in mask.shape[1:-2]), self.count)
        mask = mask.expand(self.batch, *mask.shape[1:])
        if has_rows:
            mask = mask.gather(-2, places.unsqueeze(-1).expand(*mask.shape[:-2], self.count, self.tokens))
        return mask.gather(-1, places.unsqueeze(-2).expand(*mask.shape[:-1], self.count))

    def along_tokens(self, name: str, value: Any) -> Any:
        """An input that runs over tokens, or a tuple or list of such; None stays None.

        Raises:
            UsageError: it has no dim of tokens beside one of samples.
        """
        if value is None:
            return None
        if isinstance(value, tuple | list):
            parts = [self.along_tokens(name, part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        batch_first = self._order(value) if isinstance(value, Tensor) else None
        if batch_first is None:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            msg = (
                f"{name} is {found} for {self.batch} samples of {self.tokens} tokens; each sample keeps tokens of its "
                "own, so give it as [B or 1, S, ...] or [S, B or 1, ...]"
            )
            raise UsageError(msg)
        shape = list(value.shape)
        shape[0 if batch_first else 1] = self.batch
        return self._replaced(value, gather(value.expand(shape), self.index, batch_first=batch_first))

    def _order(self, value: Tensor) -> bool | None:
        """True for [B or 1, S, ...], False for [S, B or 1, ...], None for neither."""
        orders = (True, False) if self.batch_first else (False, True)
        for order in orders if value.dim() >= 2 else ():
            samples, tokens = value.shape[:2] if order else (value.shape[1], value.shape[0])
            if samples in (1, self.batch) and tokens == self.tokens:
                return order
        return None

    def by_shape(self, value: Any) -> Any:
        """A part of a tuple of inputs, which has no name: masks and positions are known by their shapes."""
        if not isinstance(value, Tensor):
            return value
        if value.dim() >= 3 and not value.requires_grad and value.shape[-2:] in ((self.tokens,) * 2, (1, self.tokens)):
            return self.mask("a mask among the inputs", value)
        if value.dim() == 2 and not value.is_floating_point() and self._order(value) is not None:
            return self.along_tokens("an input", value)
        return value

    def _replaced(self, old: Tensor, new: Tensor) -> Tensor:
        self.given[id(new)] = new, old  # held, so that no other tensor gets its identity
        return new

    def restored(self, value: Any) -> Any:
        """What was given for an input that a layer has handed on; anything else is left as it is."""
        return self.given[id(value)][1] if id(value) in self.given else value
