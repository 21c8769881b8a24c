"""Reading of checkpoints: verified files, and the tensors in them."""
