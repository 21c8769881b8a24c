"""Observers of a run: progress, timings and traffic, attached to the engine's events."""
