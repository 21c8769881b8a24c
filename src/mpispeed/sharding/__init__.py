"""Floor 5: model states sharded over data-parallel ranks. One code path; stages differ in a row of placements.

Shards of parameters, gradients and optimizer states. Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models", SC20. Knows stores, meshes and update rules. Must not know the config, the engine,
or ZeRO's numbered levels.
"""
