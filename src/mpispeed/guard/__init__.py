"""Floor 6, guard: keeps a run alive, or says why it died: hangs, ends of processes, logs of ranks, fault drills.

Knows processes, memory limits, the ledger of communication and the folder of a run. Must not know the engine or the
configuration: plain values arrive. What a small process beside the ranks uses is free of torch and MPI, so nothing is
imported here.
"""
