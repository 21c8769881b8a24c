"""Batch generation: the prompts of a file answered by all ranks of a job, over as many jobs as it takes."""
