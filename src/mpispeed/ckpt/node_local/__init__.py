"""Checkpoints on node-local disks: copies to other nodes, and the search for them by a later job."""
