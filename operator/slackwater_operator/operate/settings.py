"""What the operator process is told on its command line, and the few constants of time that go with it."""

from dataclasses import dataclass

from slackwater_operator.resources import names


@dataclass(frozen=True, slots=True)
class Settings:
    """One process.  Raises ValueError on times that cannot work together."""

    identity: str
    """Which process this is; unlike any other's, also an earlier one's of the same pod."""

    pod: str = ""
    """The pod that it runs in; empty: none."""

    namespace: str = names.OPERATOR_NAMESPACE
    """Where the Lease is."""

    lease: str = names.LEASE
    host: str = "0.0.0.0"
    metrics_port: int = 8080
    """0 takes a free one."""

    probes_port: int = 8081
    gateway_image: str = ""
    """Of the gateways that the operator runs; empty: the image of the service's engine, which has the command too."""

    keeper_image: str = ""
    """Of the keepers that the operator runs; empty: the image of the job's workers."""

    tick_s: float = 0.5
    """Between two ticks when nothing happens: waits and deadlines are not finer than that."""

    shortest_tick_s: float = 0.1
    """However often something happens: ten ticks a second decide soon enough."""

    look_s: float = 1.0
    """Between two looks at what is not urgent: children, statuses, gauges."""

    lease_s: float = 7.0
    """A leader that died is followed after it; with the new one's first tick that is within 10 s."""

    renew_s: float = 4.0
    """A leader that could not renew for so long stops, before its lease runs out."""

    retry_s: float = 1.0
    stalled_after_s: float = 90.0
    """A watch without event or bookmark for so long is dead: the server sends a bookmark each minute."""

    def __post_init__(self) -> None:
        if not 0 < self.retry_s < self.renew_s < self.lease_s:
            raise ValueError(
                f"must be 0 < retry_s < renew_s < lease_s, got {self.retry_s}, {self.renew_s}, {self.lease_s}"
            )
        if not 0 < self.shortest_tick_s <= self.tick_s:
            raise ValueError(f"must be 0 < shortest_tick_s <= tick_s, got {self.shortest_tick_s}, {self.tick_s}")
