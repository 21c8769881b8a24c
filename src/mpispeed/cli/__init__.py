"""Floor 10: the command `mpispeed`. Knows everything, by imports made when a sub-command runs; never torch at start."""
