"""The public name of penstock.front.schedules."""

from penstock.front.schedules import LRRangeTest as LRRangeTest
from penstock.front.schedules import OneCycle as OneCycle
from penstock.front.schedules import WarmupCosineLR as WarmupCosineLR
from penstock.front.schedules import WarmupDecayLR as WarmupDecayLR
from penstock.front.schedules import WarmupLR as WarmupLR
