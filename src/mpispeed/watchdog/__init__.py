"""Floor 6: the watchdog of a job. Finds hangs, mismatched collectives and dead ranks, and says why a job ended.

One small process per node reads the flight recorders of its ranks and talks to those of other nodes beside MPI.
Must not know the engine.
"""
