"""`python -m slackwater_controlplane up | images | env | status | down | build`: the test cluster for a person.

Owns the words on the terminal and the reading of the environment; the other modules do the work.
"""

import json
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slackwater_controlplane.build import Programs, cache_folder
from slackwater_controlplane.errors import ControlPlaneError, ToolsMissing

if TYPE_CHECKING:  # `build` is part of every `make test` and must not wait for clients and certificates
    from slackwater_controlplane.standing import Standing, State

_TOOLS_MISSING = 3  # what .setup/controlplane --if-possible forgives

app = typer.Typer(help="A real Kubernetes on this machine, built from source.", no_args_is_help=True)


def _say(text: str) -> None:
    typer.echo(f"[controlplane] {text}")


def _programs() -> Programs:
    return Programs(cache_folder(os.environ), os.environ, say=_say)


def _standing() -> "Standing":
    from slackwater_controlplane.standing import Standing

    return Standing(cache_folder(os.environ))


@contextmanager
def _in_words() -> Iterator[None]:
    """Errors of ours as one message, not as a traceback."""
    try:
        yield
    except ControlPlaneError as error:
        typer.echo(f"[controlplane] {error}", err=True)
        raise typer.Exit(_TOOLS_MISSING if isinstance(error, ToolsMissing) else 2) from error


@app.command()
def build(
    names: Annotated[list[str] | None, typer.Argument(help="Groups or programs; all of them by default.")] = None,
) -> None:
    """Build what is missing, from source."""
    with _in_words():
        _programs().build(*(names or ()))


@app.command()
def up(
    nodes: Annotated[int, typer.Option(min=0, help="Real nodes: kubelet and containerd each; needs root.")] = 0,
    fake_nodes: Annotated[
        int | None, typer.Option(min=0, help="Nodes without processes, of kwok; 4 unless there are real ones.")
    ] = None,
) -> None:
    """Start a cluster that stays, half of its nodes with H200, half with RTX 5090, all of them only counted."""
    from slackwater_controlplane.oci import BUSYBOX_IMAGE
    from slackwater_controlplane.standing import Wanted

    wanted = Wanted(nodes, (0 if nodes else 4) if fake_nodes is None else fake_nodes)
    with _in_words():
        programs, standing = _programs(), _standing()
        state = standing.state()
        if is_new := state is None:
            programs.build(*wanted.groups)
            state = standing.start(wanted, _say)
        assert state is not None, "it is up, or start raised"
        typer.echo(f"Kubernetes {'is up' if is_new else 'was up already'} at {state.url}:\n{_nodes(state)}\n")
        typer.echo("".join(f"  {line}\n" for line in _exports(state, programs)) + "  kubectl get nodes")
        if state.nodes and is_new:
            # The nodes reach no registry; this image is on each of them.
            typer.echo(f"  kubectl run hello --rm -it --image={BUSYBOX_IMAGE} --image-pull-policy=Never -- sh")
            typer.echo(f"\nmake cluster-images brings ours to the nodes; ledgers will lie in {standing.ledgers}.")
        typer.echo("\nmake cluster-down ends it.")


@app.command()
def images() -> None:
    """Bring to the nodes what manifests/samples/cluster-up runs and reads; again after the code has changed."""
    from slackwater_controlplane import play
    from slackwater_controlplane.images import Images
    from slackwater_controlplane.node.node import load

    with _in_words():
        programs, state = _programs(), _standing().state()
        if state is None:
            raise ControlPlaneError("no cluster is up; `make cluster-up` starts one")
        if not state.nodes:
            raise ControlPlaneError(
                "fake nodes run no image; after `make cluster-down`, `make cluster-up` has real ones"
            )
        cache = cache_folder(os.environ)
        built = Images(cache, os.environ, say=_say)
        if (why := built.why_not()) is not None:
            raise ControlPlaneError(why)
        if count := play.write_recordings(cache / "recordings", play.recordings_folder(cache)):
            _say(f"{count:,} recordings lie in {play.recordings_folder(cache)}")
        with play.archives(built) as archives:
            for name, archive in archives.items():
                for socket in state.nodes.values():
                    load(programs, socket, archive)
                typer.echo(f"{name} is on {', '.join(state.nodes)}")


@app.command()
def env() -> None:
    """Say what a shell needs: `eval "$(make cluster-env)"`."""
    with _in_words():
        if (state := _standing().state()) is None:
            raise ControlPlaneError("no cluster is up; `make cluster-up` starts one")
        typer.echo("\n".join(_exports(state, _programs())))


@app.command()
def status() -> None:
    """Say what is up."""
    with _in_words():
        if (state := _standing().state()) is None:
            typer.echo("no cluster is up; `make cluster-up` starts one")
            raise typer.Exit(1)
        typer.echo(f"up at {state.url}\nkubeconfig {state.kubeconfig}\nlogs {state.log_folder}\n{_nodes(state)}")


@app.command()
def down() -> None:
    """End the cluster that `up` started, with everything in it."""
    with _in_words():
        typer.echo("ended" if _standing().stop() else "no cluster was up")


@app.command(hidden=True)
def serve(wanted: str) -> None:
    """Be the cluster's process in the background."""
    from slackwater_controlplane.standing import Wanted

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with _in_words():
        _standing().serve(_programs(), Wanted(**json.loads(wanted)))


def _exports(state: "State", programs: Programs) -> tuple[str, str]:
    """The cluster's kubeconfig, and where kubectl and slackwater are."""
    folders = f"{programs.path('kubectl').parent}:{Path(sys.prefix) / 'bin'}"
    return f"export KUBECONFIG={shlex.quote(str(state.kubeconfig))}", f"export PATH={shlex.quote(folders)}:$PATH"


def _nodes(state: "State") -> str:
    """A line a node."""
    from slackwater_controlplane.client import Admin
    from slackwater_controlplane.kwok import GPU, PRODUCT, is_ready

    with Admin(state.kubeconfig) as admin:
        found = admin.list("nodes")
    lines = [
        f"  {node['metadata']['name']:16} {'Ready' if is_ready(node) else 'not ready':10}"
        f" {node['status'].get('allocatable', {}).get(GPU, '0'):>3} x {node['metadata']['labels'].get(PRODUCT, 'GPU')}"
        for node in found
    ]
    return "\n".join(lines) or "  no nodes"
