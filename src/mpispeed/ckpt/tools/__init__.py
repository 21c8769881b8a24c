"""What the inspection commands compute: plain rows and trees, without MPI and without torch."""
