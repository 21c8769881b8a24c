"""Commands on checkpoints, without MPI; most without torch. Results are plain rows and trees."""
