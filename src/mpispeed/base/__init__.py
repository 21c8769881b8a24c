"""Floor 0: errors, units, names, events, clocks, random state, pictures.

Knows the standard library, numpy and torch only, and matplotlib where a picture is drawn.
"""
