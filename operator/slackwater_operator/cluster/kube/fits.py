"""Whether a pod could go to a node: the scheduler's rules as far as they are about the node alone.

Owns selectors, required node affinity and taints, pure.  What depends on other pods is the scheduler's to know.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slackwater_operator.kube.types import Object

HARD = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a pod asks of its node.  terms: alternatives, each a list of requirements; none = any node."""

    selector: Mapping[str, str]
    terms: Sequence[Object]
    tolerations: Sequence[Object]


ANY = Wishes({}, (), ())


def read_wishes(spec: Object) -> Wishes:
    """From a pod's spec."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or ()
    selector, tolerations = spec.get("nodeSelector") or {}, spec.get("tolerations") or ()
    return Wishes(selector, terms, tolerations) if selector or terms or tolerations else ANY


def fits(wishes: Wishes, name: str, labels: Mapping[str, str], taints: Sequence[Object]) -> bool:
    """Whether a node of that name, with these labels and taints, will do."""
    return (
        all(labels.get(key) == value for key, value in wishes.selector.items())
        and (not wishes.terms or any(_holds(term, name, labels) for term in wishes.terms))
        and all(_is_tolerated(taint, wishes.tolerations) for taint in taints if taint.get("effect") in HARD)
    )


def _holds(term: Object, name: str, labels: Mapping[str, str]) -> bool:
    asked = [
        *((one, labels.get(one["key"])) for one in term.get("matchExpressions") or ()),
        *((one, name) for one in term.get("matchFields") or ()),  # the only field there is
    ]
    return bool(asked) and all(_matches(one["operator"], one.get("values") or (), value) for one, value in asked)


def _matches(operator: str, values: Sequence[Any], value: str | None) -> bool:
    match operator:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            if value is None or not value.isdigit():
                return False
            return int(value) > int(values[0]) if operator == "Gt" else int(value) < int(values[0])
    return False


def _is_tolerated(taint: Object, tolerations: Sequence[Object]) -> bool:
    return any(
        one.get("effect") in (None, "", taint.get("effect"))
        and one.get("key") in (None, "", taint.get("key"))
        and (one.get("operator") == "Exists" or (one.get("key") and one.get("value", "") == taint.get("value", "")))
        for one in tolerations
    )
