"""The base of engines: torch's, and for type checkers (`getters.pyi`) also the names that `delegation` installs."""

from torch.nn import Module as Getters

__all__ = ["Getters"]
