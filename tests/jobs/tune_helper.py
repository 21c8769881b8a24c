"""A module of the script: each run imports it anew."""

COUNT = 0
