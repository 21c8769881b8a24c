"""Mixture of experts: routers, exchange of rows between ranks, and experts."""

from mpispeed.nn.expert.dispatch import Dispatcher, Levels, split_by_node
from mpispeed.nn.expert.experts import ExpertModules, Experts, FusedExperts, MLPExperts, SwiGLUExperts
from mpispeed.nn.expert.layer import RoutedExperts
from mpispeed.nn.expert.router import Router, RouterOptions, Routing
from mpispeed.nn.expert.sorted_plan import SortedPlan, sort_choices

__all__ = [
    "Dispatcher",
    "ExpertModules",
    "Experts",
    "FusedExperts",
    "Levels",
    "MLPExperts",
    "RoutedExperts",
    "Router",
    "RouterOptions",
    "Routing",
    "SortedPlan",
    "SwiGLUExperts",
    "sort_choices",
    "split_by_node",
]
