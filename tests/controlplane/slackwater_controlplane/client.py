"""A small synchronous client for tests: plain dicts in and out, resources named as kubectl names them.

Owns the requests of tests alone; the product has its own client, which must not be what judges it.
"""

import json
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from slackwater_controlplane import kubeconfig
from slackwater_controlplane.errors import ControlPlaneError

Object = dict[str, Any]
Objects = list[Object]

_DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
_PATCHES = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "strategic": "application/strategic-merge-patch+json",
}
_TIMEOUT_S = 30.0
_POLL_S = 0.05


class ApiError(ControlPlaneError):
    """The API server said no.  code: HTTP's.   reason: Kubernetes' word, as NotFound, Conflict, Forbidden, Invalid."""

    def __init__(self, code: int, reason: str, message: str, details: Object) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.details = details


class Admin:
    """A user's way to one cluster; the administrator's unless the kubeconfig is another one's.

    Resources are `pods`, `deployments.apps`, `reclaims.slackwater.dev`: what the server says that it has, so that kinds
    made by a test are found too.  Without a namespace, namespaced objects are those of `default`, and lists of all.
    """

    def __init__(self, kubeconfig_file: Path, *, user_agent: str = "slackwater-tests") -> None:
        access = kubeconfig.read(kubeconfig_file)
        self.kubeconfig = kubeconfig_file
        self.server = access.server
        headers = [("User-Agent", user_agent), ("Accept", "application/json")]
        if access.token:
            headers.append(("Authorization", f"Bearer {access.token}"))
        if access.user:
            headers += [("Impersonate-User", access.user), *(("Impersonate-Group", group) for group in access.groups)]
        self.http = httpx.Client(
            base_url=access.server,
            verify=_ssl_context(access),
            headers=headers,
            timeout=_TIMEOUT_S,
            trust_env=False,  # a proxy has nothing to do with a cluster on this machine
        )
        self._resources: dict[str, Object] = {}
        self._kinds: dict[tuple[str, str], str] = {}

    def close(self) -> None:
        self.http.close()

    def __enter__(self) -> "Admin":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- reading

    def get(self, resource: str, name: str, namespace: str | None = None, *, subresource: str = "") -> Object:
        """One object.  Raises ApiError, NotFound as any other."""
        return self._json("GET", self.path(resource, name, namespace, subresource=subresource))

    def find(self, resource: str, name: str, namespace: str | None = None) -> Object | None:
        """One object, or None when there is none."""
        try:
            return self.get(resource, name, namespace)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    def list(self, resource: str, namespace: str | None = None, *, labels: str = "", fields: str = "") -> Objects:
        """Every object that the selectors choose, in all namespaces unless one is named.  Items carry their kind."""
        found = self.list_whole(resource, namespace, labels=labels, fields=fields)
        kind = {"apiVersion": found["apiVersion"], "kind": found["kind"].removesuffix("List")}
        return [kind | item for item in found["items"]]

    def list_whole(self, resource: str, namespace: str | None = None, *, labels: str = "", fields: str = "") -> Object:
        """The list as the server gives it, with its resourceVersion."""
        params = {"labelSelector": labels, "fieldSelector": fields}
        chosen = {key: value for key, value in params.items() if value}
        return self._json("GET", self._collection(resource, namespace), params=chosen)

    def watch(self, resource: str, namespace: str | None = None, *, since: str, timeout_s: int) -> Iterator[Object]:
        """The events after a resourceVersion, for a bounded time."""
        params: dict[str, Any] = {"watch": "1", "resourceVersion": since, "timeoutSeconds": timeout_s}
        path = self._collection(resource, namespace)
        with self.http.stream("GET", path, params=params, timeout=timeout_s + _TIMEOUT_S) as answer:
            for line in answer.iter_lines():
                yield json.loads(line)

    def logs(self, pod: str, namespace: str = "default", *, container: str = "", previous: bool = False) -> str:
        """What a container wrote.  Needs a real node."""
        params = {"container": container, "previous": "true"} if previous else {"container": container}
        path = self.path("pods", pod, namespace, subresource="log")
        return self._request("GET", path, params={key: value for key, value in params.items() if value}).text

    # ---- writing

    def create(self, body: Object) -> Object:
        """Create an object; where it goes is in itself."""
        resource, namespace = self._of(body)
        return self._json("POST", self._collection(resource, namespace), body)

    def apply(
        self, body: Object, *, manager: str = "slackwater-tests", force: bool = True, subresource: str = ""
    ) -> Object:
        """Server-side apply."""
        resource, namespace = self._of(body)
        path = self.path(resource, body["metadata"]["name"], namespace, subresource=subresource)
        params = {"fieldManager": manager, "force": str(force).lower()}
        return self._json("PATCH", path, body, params=params, content_type="application/apply-patch+yaml")

    def apply_file(self, *files: Path) -> Objects:
        """Server-side apply of every document of YAML files."""
        documents = (one for file in files for one in yaml.safe_load_all(file.read_text()) if one)
        return [self.apply(document) for document in documents]

    def replace(self, body: Object, *, subresource: str = "") -> Object:
        resource, namespace = self._of(body)
        path = self.path(resource, body["metadata"]["name"], namespace, subresource=subresource)
        return self._json("PUT", path, body)

    def patch(
        self,
        resource: str,
        name: str,
        patch: Any,
        namespace: str | None = None,
        *,
        subresource: str = "",
        kind: str = "merge",
    ) -> Object:
        """A patch of kind merge, json or strategic."""
        path = self.path(resource, name, namespace, subresource=subresource)
        return self._json("PATCH", path, patch, content_type=_PATCHES[kind])

    def delete(
        self,
        resource: str,
        name: str,
        namespace: str | None = None,
        *,
        grace_s: int | None = None,
        propagation: str | None = None,
    ) -> None:
        """Ask for an object's end; one that is gone already is fine."""
        options = {"gracePeriodSeconds": grace_s, "propagationPolicy": propagation}
        body = {key: value for key, value in options.items() if value is not None}
        try:
            self._request("DELETE", self.path(resource, name, namespace), body or None)
        except ApiError as error:
            if error.code != 404:
                raise

    def delete_all(self, resource: str, namespace: str | None = None, *, labels: str = "", grace_s: int = 0) -> None:
        """Ask for the end of a whole collection at once."""
        params = {"labelSelector": labels} if labels else {}
        collection = self._collection(resource, namespace)
        self._request("DELETE", collection, {"gracePeriodSeconds": grace_s}, params=params)

    def bind(self, pod: str, node: str, namespace: str = "default") -> None:
        """Put a pod on a node, as a scheduler does."""
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
        self._request("POST", self.path("pods", pod, namespace, subresource="binding"), body)

    # ---- waiting

    def wait_for(
        self,
        resource: str,
        name: str,
        is_right: Callable[[Object], bool] = lambda _: True,
        namespace: str | None = None,
        *,
        timeout_s: float = 30.0,
    ) -> Object:
        """The object, once it is there and right.  Raises ControlPlaneError showing what it was at the end."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            found = self.find(resource, name, namespace)
            if found is not None and is_right(found):
                return found
            if time.monotonic() > deadline_s:
                shown = "not there" if found is None else json.dumps({k: found.get(k) for k in ("metadata", "status")})
                raise ControlPlaneError(f"{resource}/{name} not as expected after {timeout_s:g} s: {shown}")
            time.sleep(_POLL_S)

    def wait_gone(self, resource: str, name: str, namespace: str | None = None, *, timeout_s: float = 30.0) -> None:
        """Return when the object is gone."""
        deadline_s = time.monotonic() + timeout_s
        while (found := self.find(resource, name, namespace)) is not None:
            if time.monotonic() > deadline_s:
                shown = json.dumps(found["metadata"])
                raise ControlPlaneError(f"{resource}/{name} still there after {timeout_s:g} s: {shown}")
            time.sleep(_POLL_S)

    def wait_established(self, *crds: str) -> None:
        """Return when the server serves the kinds of these CustomResourceDefinitions."""
        for name in crds:
            self.wait_for("customresourcedefinitions.apiextensions.k8s.io", name, _is_established)
        self._resources.clear()

    # ---- how

    def path(self, resource: str, name: str, namespace: str | None = None, *, subresource: str = "") -> str:
        """The address of one object."""
        found = self._resource(resource)
        collection = self._collection(resource, namespace or "default" if found["namespaced"] else None)
        return f"{collection}/{name}/{subresource}".rstrip("/")

    def raw(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """Any request; raises ApiError for a refusal as all others do."""
        return self._request(method, path, body, **options)

    def _collection(self, resource: str, namespace: str | None) -> str:
        found = self._resource(resource)
        middle = f"/namespaces/{namespace}" if found["namespaced"] and namespace else ""
        return f"{found['root']}{middle}/{resource.partition('.')[0]}"

    def _resource(self, resource: str) -> Object:
        for _ in range(2):
            if resource in self._resources:
                return self._resources[resource]
            self._discover()  # a kind made since is found the second time
        raise ControlPlaneError(f"the server has no resource {resource!r}; with a group it is as in deployments.apps")

    def _of(self, body: Object) -> tuple[str, str | None]:
        """Resource and namespace of an object."""
        key = (body["apiVersion"], body["kind"])
        if key not in self._kinds:
            self._discover()
        if key not in self._kinds:
            raise ControlPlaneError(f"the server has no kind {key[1]} in {key[0]}")
        resource = self._kinds[key]
        is_namespaced = self._resource(resource)["namespaced"]
        return resource, body["metadata"].get("namespace", "default") if is_namespaced else None

    def _discover(self) -> None:
        self._resources.clear()
        for root in ("/api", "/apis"):
            answer = self._request("GET", root, headers={"Accept": _DISCOVERY}).json()
            for group in answer["items"]:
                group_name = group["metadata"].get("name", "")
                for version in group["versions"]:
                    api_version = f"{group_name}/{version['version']}".lstrip("/")
                    for one in version["resources"]:
                        name = f"{one['resource']}.{group_name}".rstrip(".")
                        entry = {"root": f"{root}/{api_version}", "namespaced": one["scope"] == "Namespaced"}
                        self._resources.setdefault(name, entry)  # the first version is the preferred one
                        self._kinds[api_version, one["responseKind"]["kind"]] = name

    def _json(self, method: str, path: str, body: Any = None, **options: Any) -> Object:
        return self._request(method, path, body, **options).json()  # type: ignore[no-any-return]  # JSON

    def _request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> httpx.Response:
        content = None if body is None else json.dumps(body)
        sent = dict(headers or {}) | ({} if content is None else {"Content-Type": content_type})
        answer = self.http.request(method, path, params=params, content=content, headers=sent)
        if answer.is_success:
            return answer
        try:
            said = answer.json()
        except ValueError:
            said = {"message": answer.text.strip()}
        raise ApiError(answer.status_code, said.get("reason", ""), said.get("message", ""), said.get("details") or {})


def _is_established(crd: Object) -> bool:
    conditions = crd.get("status", {}).get("conditions") or []  # null for a moment after its creation
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


def _ssl_context(access: kubeconfig.Access) -> ssl.SSLContext | bool:
    if not access.server.startswith("https:"):
        return False
    context = ssl.create_default_context(cadata=access.ca or None)
    if access.cert:
        # OpenSSL reads a client's certificate from a file only.
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
            file.write(f"{access.cert}\n{access.key}\n")
            file.flush()
            context.load_cert_chain(file.name)
    return context
