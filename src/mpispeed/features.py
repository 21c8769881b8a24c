"""Features of your own: one that is registered has a section in the config, a place in the step, and saved state."""

from mpispeed.config.section import Section
from mpispeed.engine.attached import Feature
from mpispeed.engine.features import register, registered, unregister
from mpispeed.engine.hooks import Context, Given, Hooks, Setup
from mpispeed.engine.step import Place

__all__ = [
    "Context", "Feature", "Given", "Hooks", "Place", "Section", "Setup", "register", "registered", "unregister",
]  # fmt: skip
