"""Loading of weights of any kind of file into models sliced over ranks, and saving of sharded copies."""

from mpispeed.inference.weights.load import Loaded, load_weights

__all__ = ["Loaded", "load_weights"]
