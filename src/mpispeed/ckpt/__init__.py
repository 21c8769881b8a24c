"""Floor 5: checkpoints as named logical tensors in plain HDF5 files, independent of the layout that wrote them.

`write.save.save` writes, `read.reader.open_checkpoint` reads. This package file imports nothing, so that the
commands which only list and describe checkpoints need neither torch nor MPI.
"""
