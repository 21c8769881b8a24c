"""The ways in which data-parallel ranks come to one update: sums of gradients, or compressed exchanges.

A strategy (`strategy.ExchangeStrategy`) is chosen by the update rule in `table`; the floors above ask only for its
interface, so that none of them knows which one it is.
"""
