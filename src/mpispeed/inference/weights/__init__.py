"""Weights of a model that answers: files read once per node and scattered into shards."""
