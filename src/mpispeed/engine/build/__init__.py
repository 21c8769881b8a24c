"""Construction of an engine's components from a plan: stores, optimizers, sliced layers, swap files."""
