"""Estimates of a plan's memory and traffic, before anything is allocated."""
