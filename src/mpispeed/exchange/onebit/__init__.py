"""1-bit exchanges of momenta, gradients and local updates.

The optimizers are in `optim.onebit`, the verbs in `mesh.compressed.onebit`.
"""
