"""The public name of penstock.front.environment."""

from penstock.front.environment import adopt as adopt
from penstock.front.environment import expand_hostlist as expand_hostlist
from penstock.front.environment import node_place as node_place
