"""What the API server says when it refuses, as a sentence that tells a person what to do.

Pure.  Owns the forms of the server's own texts: a right that is missing, a pod that the namespace's security standard
does not take, a value that is printed whole.  A text of no known form is kept as it came.  Called by `errors`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

OPERATOR_ACCOUNT = "slackwater-operator"
NAMESPACE_ROLE = "slackwater-operator-namespace"
MAX_TOLD = 2  # of several faults; the others are counted

_DENIED = re.compile(
    r'is forbidden: User "(?P<user>[^"]+)" cannot (?P<verb>\S+) resource "(?P<resource>[^"]+)" in API group "[^"]*" '
    r'(?:in the namespace "(?P<namespace>[^"]+)"|at the cluster scope)'
)
_STANDARD = re.compile(r'violates PodSecurity "(?P<level>[^":]+)[^"]*": (?P<faults>.+)', re.DOTALL)
_FAULT = re.compile(r"\(((?:pod|container)[^()]*)\)")
_ACCOUNT = re.compile(r"^system:serviceaccount:(?P<namespace>[^:]+):(?P<name>[^:]+)$")
_CLOSING = {"{": "}", "[": "]"}


@dataclass(frozen=True, slots=True)
class Denial:
    """A right that somebody does not have.   namespace: "" = in all of them."""

    user: str
    verb: str
    resource: str
    namespace: str

    @property
    def subject(self) -> str:
        """Who it is, as an option of `kubectl create rolebinding`."""
        account = _ACCOUNT.match(self.user)
        return f"--serviceaccount={account['namespace']}:{account['name']}" if account else f"--user={self.user}"

    @property
    def short(self) -> str:
        """The end of the name, as part of an object's name."""
        return re.sub(r"[^a-z0-9]+", "-", re.split(r"[:/]", self.user)[-1].lower()).strip("-")

    def __str__(self) -> str:
        place = f"in namespace {self.namespace}" if self.namespace else "in the cluster"
        account = _ACCOUNT.match(self.user)
        if account is None or account["name"] != OPERATOR_ACCOUNT:
            return f"{self.user} may not {self.verb} {self.resource} {place}"
        if not self.namespace:
            return f"the operator may not {self.verb} {self.resource} {place}; apply its manifests again"
        return (
            f"the operator has no rights {place} ({self.verb} {self.resource}); to give them: kubectl create "
            f"rolebinding {OPERATOR_ACCOUNT} -n {self.namespace} --clusterrole={NAMESPACE_ROLE} {self.subject}"
        )


def denial(said: str) -> Denial | None:
    """The right that is missing; None if the refusal has another reason."""
    found = _DENIED.search(said)
    return found and Denial(found["user"], found["verb"], found["resource"], found["namespace"] or "")


def insecure(said: str) -> str:
    """What a pod has to change for the namespace's pod security standard, "" if that is not the reason."""
    found = _STANDARD.search(said)
    if found is None:
        return ""
    faults = _FAULT.findall(found["faults"]) or [found["faults"].strip()]
    return f"the namespace takes only pods of the standard {found['level']}: {shortened(faults)}"


def shortened(faults: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = f"; and {len(faults) - MAX_TOLD} more" if len(faults) > MAX_TOLD else ""
    return "; ".join(faults[:MAX_TOLD]) + more


def without_value(said: str) -> str:
    """`Invalid value: {a whole object}: why` without the object, which nobody finds the fault in."""
    head, found, rest = said.partition("Invalid value: ")
    opening = re.match(r"[\w.*&]*([{\[])", rest) if found and not head else None
    if opening is None:
        return said
    end = _end_of(rest, opening.end() - 1)
    return rest[end:].removeprefix(":").strip() or said


def _end_of(text: str, start: int) -> int:
    """Just after the bracket that closes the one at start; the end of the text if none does."""
    open_, close = text[start], _CLOSING[text[start]]
    depth, quoted, escaped = 0, False, False
    for at in range(start, len(text)):
        letter = text[at]
        if escaped:
            escaped = False
        elif letter == "\\":
            escaped = quoted
        elif letter == '"':
            quoted = not quoted
        elif not quoted and letter in (open_, close):
            depth += 1 if letter == open_ else -1
            if depth == 0:
                return at + 1
    return len(text)
