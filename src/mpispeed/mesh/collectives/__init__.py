"""Algorithms of the verbs over a `Group`: checks, order of reduction, non-blocking forms, channels."""
