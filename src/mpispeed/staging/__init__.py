"""Floor 3: packs the environment of this Python into one file, and unpacks it on the disks of nodes.

Ranks that start from there read nothing of the environment from the shared file system: one file is read per job, in
place of thousands per rank. `contents` says what belongs to an environment, `pack` writes the archive, `unpack` is what
runs on each node (by itself: standard library only), `broadcast` is an MPI job of one rank per node that sends the
archive, `spread` gets it to the nodes of a job by one of them.

Must not import torch, and knows nothing of launchers but command lines that it is given.
"""
