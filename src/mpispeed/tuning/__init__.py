"""Floor above launch: finds settings of a run by trials of the user's script in one job.

The tuner is no MPI process. It starts one worker job, whose ranks run the script again and again with the settings of a
trial, and starts another after a trial that has ended it.
"""
