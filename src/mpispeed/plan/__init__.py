"""Floor 7: config and world size resolved into a plan, with every "auto" decided.

Below the engine, above its components. Values of a `Plan` are plain; nothing is built here.
"""
