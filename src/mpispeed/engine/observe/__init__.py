"""Observers of a run: progress, timings, traffic and 1-bit reports, attached to the engine's events."""
