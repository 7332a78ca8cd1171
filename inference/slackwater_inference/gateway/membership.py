"""Which replicas the gateway sends to: how it is told, and whether it ever was.

Owns the shape of that message on every wire: a line from the supervisor, a PUT from the operator, an option from a
person.  The last one that was right stands.  Called by `cli`, `server` and `control`.
"""

from collections import Counter
from collections.abc import Sequence

import pydantic

from slackwater_inference.core import PermanentError
from slackwater_inference.gateway.app import Gateway
from slackwater_inference.gateway.routing import ReplicaSpec


class BadReplicas(PermanentError):
    """A set of replicas that cannot be taken; the message names each field that is wrong."""


class ReplicaMessage(pydantic.BaseModel):
    """A replica as a person, the supervisor or the operator writes it; fields that we do not know are ignored."""

    uid: str = pydantic.Field(min_length=1)
    url: pydantic.HttpUrl
    slots: int = pydantic.Field(ge=1)

    def spec(self) -> ReplicaSpec:
        """The checked value that the rest works with."""
        return ReplicaSpec(self.uid, str(self.url), self.slots)


class _ReplicasMessage(pydantic.BaseModel):
    replicas: list[ReplicaMessage]

    @pydantic.model_validator(mode="after")
    def _names_each_once(self) -> "_ReplicasMessage":
        twice = [uid for uid, times in Counter(replica.uid for replica in self.replicas).items() if times > 1]
        if twice:
            raise ValueError(f"each uid must be there once, {twice[0]!r} is there again")
        return self


class Membership:
    """The gateway's replicas, as it was told last.  One event loop; all methods are called on it.

    given: from the command line; none = it was not told yet.
    """

    def __init__(self, gateway: Gateway, given: Sequence[ReplicaSpec] = ()) -> None:
        self._gateway = gateway
        self.is_told = False
        if given:
            self._take(list(given))

    def tell(self, message: object) -> None:
        """Replace the set by `message["replicas"]`.  Raises BadReplicas, and the last good set stays."""
        self._take(specs_of(message))

    def _take(self, specs: list[ReplicaSpec]) -> None:
        self._gateway.set_replicas(specs)
        self.is_told = True


def specs_of(message: object) -> list[ReplicaSpec]:
    """The replicas that a message names.  Raises BadReplicas, in one line."""
    try:
        parsed = _ReplicasMessage.model_validate(message)
    except pydantic.ValidationError as error:
        raise BadReplicas("; ".join(_sentence(fault) for fault in error.errors()[:5])) from None
    return [replica.spec() for replica in parsed.replicas]


def _sentence(fault: object) -> str:
    assert isinstance(fault, dict)
    place = ".".join(str(part) for part in fault["loc"])
    return f"{place}: {fault['msg']}, got {fault['input']!r:.80}" if place else str(fault["msg"])
