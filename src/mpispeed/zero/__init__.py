"""Floor 5: model states cut over data-parallel ranks. One code path; what differs is a row of placements.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC20.
Knows stores, meshes and update rules. Must not know the config, the engine, or ZeRO's numbered levels.
"""
