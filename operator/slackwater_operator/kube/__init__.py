"""A Kubernetes client for one operator: JSON dicts over aiohttp, no model objects.

`Connection` (where and as whom) -> `Kube` (verbs) -> `Cache` (list and watch), `Elector` (Lease),
`Recorder` (Events).  Knows nothing of our kinds: those are `resources`.
"""

from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.connection import Connection
from slackwater_operator.kube.election import Elector
from slackwater_operator.kube.events import Recorder
from slackwater_operator.kube.transport import Limits
from slackwater_operator.kube.trim import lean, only
from slackwater_operator.kube.types import Object, Resource, custom

__all__ = [
    "Cache",
    "Connection",
    "Elector",
    "Kube",
    "Limits",
    "Object",
    "Recorder",
    "Resource",
    "custom",
    "lean",
    "only",
]
