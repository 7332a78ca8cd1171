"""The job that a ledger belongs to.

Owns the record `job`: made by the first worker, compared by every other.  Two workers with different settings would
make different bytes for the same item, so the second is refused.
"""

import json
from collections.abc import Mapping
from typing import Any

from slackwater_workers.config import fingerprint
from slackwater_workers.core import WrongLedger
from slackwater_workers.ledger.parts import FORMAT
from slackwater_workers.ledger.store import Store

JOB = "job"


def join_job(store: Store, job: str, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The ledger's job record, made now if there is none.

    Raises WrongLedger, naming each setting or step version that differs.
    """
    record = {"format": FORMAT, "job": job, "fingerprint": fingerprint(identity), "identity": identity}
    # The names first: a racing worker makes `job` before anything else, so what was seen without it is foreign.
    others = [name for name in store.names("") if name not in ("tmp", "lost+found")]
    if not store.exists(JOB):
        if others:
            raise WrongLedger(f"{store.location('')} is not a ledger and not empty (it holds {others[0]!r})")
        store.create(JOB, json.dumps(record, indent=1, sort_keys=True).encode())
    known = read_job(store)
    if known is None or known["fingerprint"] != record["fingerprint"]:
        raise WrongLedger(f"{store.location('')} was made with {_differences(known, identity)}; use another --output")
    return known


def read_job(store: Store) -> dict[str, Any] | None:
    """The job record; None when the folder holds no ledger.  Raises WrongLedger for another format."""
    body = store.read(JOB)
    if body is None:
        return None
    try:
        record: dict[str, Any] = json.loads(body)
        if record["format"] != FORMAT:
            raise WrongLedger(f"{store.location(JOB)} has format {record['format']}, this program reads {FORMAT}")
    except (ValueError, KeyError, TypeError) as error:
        raise WrongLedger(f"{store.location(JOB)} is damaged: {error}") from error
    return record


def _differences(known: Mapping[str, Any] | None, identity: Mapping[str, Any]) -> str:
    found = []
    for group, values in identity.items():
        old = (known or {}).get("identity", {}).get(group, {})
        for key in sorted({*old, *values}):
            if old.get(key) != values.get(key):
                found.append(f"{key}={old.get(key)} (now {values.get(key)})")
    return ", ".join(found)
