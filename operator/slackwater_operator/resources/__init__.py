"""The five custom resources, as typed values.

Owns their fields, defaults and rules, the names that everything in a cluster shares, and the closed sets of
conditions; `crd` writes the CustomResourceDefinitions from them.  Talks to no server.
"""

from slackwater_operator.resources.base import Condition, Resource, duration, seconds
from slackwater_operator.resources.cleaning import CleaningJob
from slackwater_operator.resources.flavor import GPUFlavor
from slackwater_operator.resources.inference import InferenceDeployment
from slackwater_operator.resources.parse import parse
from slackwater_operator.resources.pool import CapacityPool
from slackwater_operator.resources.reclaim import Reclaim

KINDS: tuple[type[Resource], ...] = (GPUFlavor, CapacityPool, InferenceDeployment, CleaningJob, Reclaim)

__all__ = [
    "KINDS",
    "CapacityPool",
    "CleaningJob",
    "Condition",
    "GPUFlavor",
    "InferenceDeployment",
    "Reclaim",
    "Resource",
    "duration",
    "parse",
    "seconds",
]
