"""Floor 6, tokens: the token ids of documents in one HDF5 file, read by position.

Knows files and plain numbers; torch only where samples are made. Must not know the engine, the configuration, or in
which order samples are asked for. Nothing here communicates but `open_store`, which hands one descriptor to the ranks
of a node.
"""
