"""Floor 6: runs that end in time. The end of the job, the last safe step, requests to save or stop, requeueing.

Must not know the engine, which acts on this between steps.
"""
