"""Loading of weights of any kind of file into models sliced over ranks, and saving of sharded copies."""

from mpispeed.inference.weights.load import Loaded, load_weights
from mpispeed.inference.weights.sharded import save_sharded

__all__ = ["Loaded", "load_weights", "save_sharded"]
