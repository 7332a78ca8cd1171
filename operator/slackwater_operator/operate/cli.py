"""`slackwater operator`, `get`, `explain` and `what-if`.

Owns options and the form of errors; imports the rest only when a command runs.  The few variables that Kubernetes and
kubectl set are read here, as options that may be left out; sides are handed the whole environment.
"""

import asyncio
import json
import logging
import os
import secrets
import shlex
from collections.abc import Coroutine
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slackwater_operator.core import PermanentError, TemporaryError
from slackwater_operator.resources import names

if TYPE_CHECKING:
    from slackwater_operator.kube.connection import Connection
    from slackwater_operator.operate.sight import Sight

operator = typer.Typer(help="Keep a cluster's GPUs as its resources say.", add_completion=False)
get = typer.Typer(help="Show who holds each GPU of a cluster.", add_completion=False)
explain = typer.Typer(help="Say in words how a resource stands, and what was decided.", add_completion=False)
what_if = typer.Typer(help="Say which workers would stop if a service's traffic rose.", add_completion=False)


class Topic(StrEnum):
    """What `get` shows."""

    POOLS = "pools"
    JOBS = "jobs"
    SERVICES = "services"
    RECLAIMS = "reclaims"


_LISTED = {
    Topic.JOBS: names.CLEANING_JOB,
    Topic.SERVICES: names.INFERENCE_DEPLOYMENT,
    Topic.RECLAIMS: names.RECLAIM,
}


class Form(StrEnum):
    """How it is printed."""

    TEXT = "text"
    JSON = "json"


Kubeconfig = Annotated[Path | None, typer.Option(help="As kubectl finds it, if left out.")]
Context = Annotated[str | None, typer.Option(help="Of the kubeconfig; its current one by default.")]
Output = Annotated[Form, typer.Option("--output", "-o", help="JSON for scripts.")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="The context's own by default.")]
Only = Annotated[str | None, typer.Option("--namespace", "-n", help="Only this one; all of them by default.")]
Files = Annotated[str, typer.Option(envvar="KUBECONFIG", hidden=True)]
ApiHost = Annotated[str, typer.Option(envvar="KUBERNETES_SERVICE_HOST", hidden=True)]
ApiPort = Annotated[str, typer.Option(envvar="KUBERNETES_SERVICE_PORT", hidden=True)]


@operator.callback()
def about() -> None:
    """Keep a cluster's GPUs as its resources say."""


@operator.command("run")
def run_operator(
    namespace: Annotated[str, typer.Option(help="Where the Lease is.")] = names.OPERATOR_NAMESPACE,
    identity: Annotated[str, typer.Option(help="This replica's name: its pod's.")] = "",
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8080,
    probes_port: Annotated[int, typer.Option(min=1, max=65535, help="GET /healthz.")] = 8081,
    host: Annotated[str, typer.Option(help="Address of both.")] = "0.0.0.0",
    gateway_image: Annotated[str, typer.Option(help="Of gateways; the operator's own by default.")] = "",
    keeper_image: Annotated[str, typer.Option(help="Of keepers; that of the job's workers by default.")] = "",
    side: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help="Run this too while leading: slurm=FILE is `slackwater slurm run` for the pools that FILE names. "
            "May be given once for each side.",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Log every step, not only decisions.")] = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    files: Files = "",
    api_host: ApiHost = "",
    api_port: ApiPort = "",
) -> None:
    """Run one replica until SIGTERM; one of all replicas leads."""
    from slackwater_operator.operate.process import Operator
    from slackwater_operator.operate.settings import Settings
    from slackwater_operator.operate.sides import open_sides

    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    for name in ("httpx", "httpcore", "asyncio", "aiohttp"):
        logging.getLogger(name).setLevel(logging.WARNING)  # a line for each poll tells nothing new
    settings = Settings(
        identity=f"{identity or 'operator'}_{secrets.token_hex(4)}",
        pod=identity,
        namespace=namespace,
        host=host,
        metrics_port=metrics_port,
        probes_port=probes_port,
        gateway_image=gateway_image,
        keeper_image=keeper_image,
    )

    async def operate() -> None:
        connection = _connection(kubeconfig, context, files, api_host, api_port)
        sides = open_sides(side or (), connection, os.environ)
        await Operator(connection, settings, sides).run(lambda line: typer.echo(f"slackwater operator: {line}"))

    _run(operate())


@get.command()
def run_get(
    topic: Annotated[Topic, typer.Argument(help="What to show.")] = Topic.POOLS,
    namespace: Only = None,
    output: Output = Form.TEXT,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    files: Files = "",
    api_host: ApiHost = "",
    api_port: ApiPort = "",
) -> None:
    """Pools with every node and who holds its GPUs; jobs; services; the newest reclaims."""
    from slackwater_operator.kube.client import Kube
    from slackwater_operator.operate import show
    from slackwater_operator.operate.sight import sight
    from slackwater_operator.operate.watches import resource_of

    if namespace is not None and topic is Topic.POOLS:
        raise typer.BadParameter("pools and nodes belong to no namespace: leave -n out")

    async def look() -> None:
        connection = _connection(kubeconfig, context, files, api_host, api_port)
        if topic is Topic.POOLS:
            async with sight(connection) as seen:
                document = show.pools_document(sorted(seen.watches.pools.values(), key=_key), seen.snapshot)
        else:
            async with Kube(connection, "slackwater/cli") as kube:
                objects, _ = await kube.list(resource_of(_LISTED[topic]), namespace)
            document = show.list_document(topic, sorted(objects, key=_key))
        _print(document, show.TEXTS[topic](document), output)

    _run(look(), is_viewer=True)


@explain.command()
def run_explain(
    what: Annotated[str, typer.Argument(metavar="KIND/NAME", help="infd/tts, clj/podcasts, cpool/dc-east …")],
    namespace: Namespace = None,
    output: Output = Form.TEXT,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    files: Files = "",
    api_host: ApiHost = "",
    api_port: ApiPort = "",
) -> None:
    """Its conditions, and the decisions about it, newest last."""
    from slackwater_operator.kube.client import Kube
    from slackwater_operator.kube.errors import Forbidden
    from slackwater_operator.kube.types import EVENTS, Object, uid_of
    from slackwater_operator.operate import show
    from slackwater_operator.operate.watches import resource_of

    kind, name = split(what)

    async def look() -> None:
        connection = _connection(kubeconfig, context, files, api_host, api_port)
        place = (namespace or connection.namespace) if kind.namespaced else None
        async with Kube(connection, "slackwater/cli") as kube:
            obj = await kube.get(resource_of(kind), name, place)
            events: list[Object] = []
            unseen = ""
            try:
                # Not by name: an object that bore it earlier is another one.
                events, _ = await kube.list(EVENTS, place or "default", fields=f"regarding.uid={uid_of(obj)}")
            except Forbidden as error:
                unseen = str(error.denial or error)
        document = show.explain_document({"kind": kind.kind, **obj}, events, unseen)
        _print(document, show.explain_text(document), output)

    _run(look(), is_viewer=True)


@what_if.command()
def run_what_if(
    what: Annotated[str, typer.Argument(metavar="infd/NAME", help="The service.")],
    traffic: Annotated[float, typer.Option(min=0.0, help="So many times the traffic of now.")] = 3.0,
    namespace: Namespace = None,
    output: Output = Form.TEXT,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    files: Files = "",
    api_host: ApiHost = "",
    api_port: ApiPort = "",
) -> None:
    """Which workers would stop, within what time, and what work would be done again.  Changes nothing."""
    from slackwater_operator.operate import show
    from slackwater_operator.operate.dryrun import forecast
    from slackwater_operator.operate.sight import sight

    kind, name = split(what)
    if kind is not names.INFERENCE_DEPLOYMENT:
        raise typer.BadParameter(f"traffic is a service's: wanted infd/NAME, got {what}")

    async def look() -> None:
        connection = _connection(kubeconfig, context, files, api_host, api_port)
        service = f"{namespace or connection.namespace}/{name}"
        async with sight(connection, ask=True) as seen:
            _must_be_valid(seen, service)
            try:
                found = forecast(seen.snapshot, service, multiplier=traffic)
            except ValueError as error:
                raise PermanentError(str(error)) from error
        document = show.what_if_document(found, traffic)
        _print(document, show.what_if_text(document), output)

    _run(look(), is_viewer=True)


def split(what: str) -> tuple[names.KindNames, str]:
    """`KIND/NAME`, the kind by any of its names.  Raises typer.BadParameter."""
    wanted, _, name = what.partition("/")
    for kind in names.KINDS:
        if name and wanted.lower() in (kind.short, kind.singular, kind.plural):
            return kind, name
    known = ", ".join(kind.short for kind in names.KINDS)
    raise typer.BadParameter(f"wanted KIND/NAME with one of {known} as KIND, got {what!r}")


def _must_be_valid(seen: "Sight", service: str) -> None:
    namespace, _, name = service.partition("/")
    if (why := seen.catalog.services.refused.get((namespace, name))) is not None:
        raise PermanentError(why)


def _connection(kubeconfig: Path | None, context: str | None, files: str, api_host: str, api_port: str) -> "Connection":
    from slackwater_operator.kube.connection import Connection

    told = {"KUBECONFIG": files, "KUBERNETES_SERVICE_HOST": api_host, "KUBERNETES_SERVICE_PORT": api_port}
    return Connection.default(kubeconfig, context, {name: value for name, value in told.items() if value})


def _run(act: Coroutine[Any, Any, None], *, is_viewer: bool = False) -> None:
    """Run to the end; what a person can mend becomes one line and exit code 2."""
    try:
        asyncio.run(act)
    except (PermanentError, TemporaryError) as error:
        raise typer.BadParameter(f"{error}{_how_to_see(error) if is_viewer else ''}") from error


def _how_to_see(error: Exception) -> str:
    """The command that gives somebody who may not look the right to."""
    from slackwater_operator.kube.errors import Forbidden

    if not isinstance(error, Forbidden) or error.denial is None:
        return ""
    denial = error.denial
    binding, role, place = "clusterrolebinding", names.VIEW_CLUSTER_ROLE, ""
    if denial.namespace:
        binding, role, place = "rolebinding", "view", f" -n {denial.namespace}"
    command = f"{binding} {role}-{denial.short}{place} --clusterrole={role} {shlex.quote(denial.subject)}"
    return f"; an administrator lets you look: kubectl create {command}"


def _print(document: dict[str, Any], text: str, output: Form) -> None:
    typer.echo(json.dumps(document, indent=2) if output is Form.JSON else text)


def _key(obj: dict[str, Any]) -> tuple[str, str]:
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]
