"""What is done to workers. Each action says how it is seen from the outside, and how it is seen to be over."""

from dyn_chaos.actions.base import Action, Deed, Scene, strike, undo
from dyn_chaos.actions.drain import Drain, Replace
from dyn_chaos.actions.network import Drop
from dyn_chaos.actions.signals import Kill, Stall, leader, members, port_owner

__all__ = [
    "Action",
    "Deed",
    "Drain",
    "Drop",
    "Kill",
    "Replace",
    "Scene",
    "Stall",
    "leader",
    "members",
    "port_owner",
    "strike",
    "undo",
]
