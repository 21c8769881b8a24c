"""Floor 6, flops: counts the floating-point operations of a model, by module and by pass, with two ways of counting.

Knows torch, and what operators of `native` and calls of `nn` compute. Must not know the configuration or the engine:
who profiles a step starts a counter around it and reads it afterwards.
"""
