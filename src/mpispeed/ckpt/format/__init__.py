"""The checkpoint format: HDF5 files, manifest, tags, logical tensors. Needs no engine."""
