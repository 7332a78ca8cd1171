"""The API server's audit log, parsed: who asked for what, when, and what the answer was.

Owns the policy of what is logged and the reading of it.  Tests count API calls with it, benches measure by its times.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

# Of everything, the request's line and the answer's; health checks and leases of nodes are noise at any size.
POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  nonResourceURLs: ["/healthz*", "/readyz*", "/livez*", "/metrics"]
- level: None
  namespaces: [kube-node-lease]
- level: Metadata
"""


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One request.  A watch has two: its stage is ResponseStarted, then ResponseComplete when it ends."""

    stage: str
    verb: str
    user: str
    user_agent: str
    resource: str
    subresource: str
    namespace: str
    name: str
    uri: str
    code: int
    received_s: float
    answered_s: float

    @property
    def duration_s(self) -> float:
        return self.answered_s - self.received_s


def read(path: Path, offset: int = 0) -> Iterator[AuditEvent]:
    """The events of a log file from a byte on; a line that is being written is left for the next time."""
    if not path.exists():
        return
    with path.open("rb") as log:
        log.seek(offset)
        for line in log:
            if line.endswith(b"\n"):
                yield parse(line)


def parse(line: bytes) -> AuditEvent:
    event = json.loads(line)
    target = event.get("objectRef", {})
    return AuditEvent(
        stage=event["stage"],
        verb=event["verb"],
        user=event["user"].get("username", ""),
        user_agent=event.get("userAgent", ""),
        resource=target.get("resource", ""),
        subresource=target.get("subresource", ""),
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        uri=event["requestURI"],
        code=event.get("responseStatus", {}).get("code", 0),
        received_s=datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp(),
        answered_s=datetime.fromisoformat(event["stageTimestamp"]).timestamp(),
    )
