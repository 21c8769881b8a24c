"""torch.distributed over MPI: process groups whose verbs are those of our groups, and a key-value store."""
