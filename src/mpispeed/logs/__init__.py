"""Floor 6: logs of ranks, one file each, and one merged view of them."""
