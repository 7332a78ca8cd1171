"""Old Reclaims: kept for a day, and at most some hundreds of a namespace, then deleted; the metrics keep the totals.

Owns the choice and the deletes.  A take-back that is not over is never touched.
"""

import logging
from collections.abc import Iterable

from slackwater_operator.core import PermanentError, TemporaryError
from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.errors import NotFound
from slackwater_operator.kube.types import Object, key_of, parse_stamp

logger = logging.getLogger(__name__)

KEEP_S = 86_400.0
KEEP_COUNT = 300  # of one namespace
YOUNG_S = 3_600.0  # kept though there are more
AT_ONCE = 20  # deletes of one look: a burst of old records must not crowd out what is urgent
ENDED = ("Freed", "Serving", "Cancelled", "Failed")


def outdated(reclaims: Iterable[Object], now_s: float) -> list[Object]:
    """Those to delete, the oldest first.  now_s: Unix time."""
    by_namespace: dict[str, list[tuple[float, Object]]] = {}
    for reclaim in reclaims:
        age_s = now_s - parse_stamp(reclaim["metadata"]["creationTimestamp"])
        by_namespace.setdefault(key_of(reclaim)[0], []).append((age_s, reclaim))
    found: list[tuple[float, Object]] = []
    for listed in by_namespace.values():
        listed.sort(key=lambda one: one[0])
        for rank, (age_s, reclaim) in enumerate(listed):
            if _is_over(reclaim) and (age_s > KEEP_S or (rank >= KEEP_COUNT and age_s > YOUNG_S)):
                found.append((age_s, reclaim))
    found.sort(key=lambda one: -one[0])
    return [reclaim for _, reclaim in found]


async def tidy(kube: Kube, cache: Cache, now_s: float) -> None:
    """Delete what is outdated; raises nothing."""
    for reclaim in outdated([*cache.values()], now_s)[:AT_ONCE]:
        namespace, name = key_of(reclaim)
        try:
            await kube.delete(cache.resource, name, namespace, uid=reclaim["metadata"]["uid"])
        except NotFound:
            continue
        except (TemporaryError, PermanentError) as error:
            logger.warning("an old record stays: %s", error)
            return


def _is_over(reclaim: Object) -> bool:
    phase = (reclaim.get("status") or {}).get("phase")
    is_answered = bool(reclaim["spec"].get("dryRun")) and phase is not None
    return not reclaim["metadata"].get("deletionTimestamp") and (phase in ENDED or is_answered)
