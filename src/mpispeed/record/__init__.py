"""Floor 6, record: one HDF5 file for each job that says what the run did, also after a kill.

Rank 0 writes it beside training, readers need nothing but h5py. Must not know the engine or the configuration: what is
recorded arrives as plain values. Nothing here communicates.
"""
