# Levels of vector instructions: each module has its own loops, and so its own level.

cdef extern from "levels.h" nogil:
    int mps_best_level()
    int mps_level()
    int mps_force_level(int level)


def vector_level():
    """The x86-64 level (4, 3 or 1) of the loops that run now."""
    return mps_level()


def best_vector_level():
    """The highest level that this processor and this build have."""
    return mps_best_level()


def set_vector_level(int level):
    """Run the loops of this level from now on; the bits do not change."""
    if mps_force_level(level):
        best = mps_best_level()
        raise ValueError(f"vector level {level} is not there; levels are 1, 3 and 4, the best here is {best}")
