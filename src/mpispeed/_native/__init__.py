"""Compiled modules, built from cython/: arithmetic on buffers, without MPI, torch or numpy symbols.

Only `mpispeed.native` imports them; it gives each a Python face and a reference in torch.
"""
