"""Floor 0: errors, units, names, events, clocks, random state. Knows the standard library, numpy and torch only."""
