"""Floor 6: fault injection. Breaks a run on purpose, and checks that the right thing happened.

Must not know the engine.
"""
