"""Transports: MPI, one rank alone, memory shared on a node."""
