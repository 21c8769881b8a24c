"""Floor 5: checkpoints as named logical tensors in one plain HDF5 file, whatever the layout that wrote them.

`save.save` writes, `load.open_checkpoint` reads. This package file imports nothing, so that the
commands which only list and describe checkpoints need neither torch nor MPI.
"""
