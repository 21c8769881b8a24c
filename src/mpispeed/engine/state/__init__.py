"""State of an engine outside of training: checkpoints, state dicts of weights, offloaded states."""
