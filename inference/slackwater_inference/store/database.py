"""The database: SQLite for one process, PostgreSQL for many.

Owns connections, transactions, the schema's version and how a database's error reads here.  Owns no table
(tables) and no query (keys, voices).  Every call blocks; callers on an event loop make it in a thread.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import QueuePool

from slackwater_inference.core import TemporaryError
from slackwater_inference.store.errors import StoreFault, StoreUnavailable
from slackwater_inference.store.tables import MIGRATIONS, Migration

logger = logging.getLogger(__name__)

MEMORY_URL = "sqlite://"
_BUSY_TIMEOUT_S = 10.0
_POOL_SIZE = 8  # more threads than this wait for a connection
_UPGRADE_LOCK = 7_205_759_403  # any number, the same in every process that upgrades
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# SQLSTATE classes of PostgreSQL after which the same statement can succeed: connection, rollback by the server
# (deadlock), resources (disk full, too many connections), operator's intervention (restart), lock not available.
_TEMPORARY_CLASSES = ("08", "40", "53", "57", "55")
_NOT_NOW = ("the database system is", "too many", "connection slots")  # starting up, shutting down; full
_TEMPORARY_SQLITE = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL")


class Database:
    """One database.  Safe to use from threads; one transaction is one thread's.

    url: `sqlite://` (in memory, gone with the process), `sqlite:///relative.db`, `sqlite:////absolute.db`, or
    `postgresql://user:password@host/name`.
    Raises StoreFault for a URL or schema that cannot be used, StoreUnavailable if the server does not answer.
    """

    def __init__(self, url: str, migrations: Sequence[Migration] = MIGRATIONS) -> None:
        parsed = _parse(url)
        self._is_sqlite = parsed.get_backend_name() == "sqlite"
        # For messages: no user, no password, and none of the options, which may hold one.
        self.name = f"{parsed.get_backend_name()}://{parsed.host or ''}/{parsed.database or ''}"
        try:
            self._engine = _sqlite(parsed) if self._is_sqlite else _postgresql(parsed)
            self._upgrade(migrations)
        except BaseException:
            if hasattr(self, "_engine"):
                self._engine.dispose()
            raise

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads."""
        with self._transaction(writes=False) as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that may write; committed at the end, rolled back if the block raises.

        SQLite takes its one write lock at once, so that two writers queue instead of failing half-way.
        """
        with self._transaction(writes=True) as connection:
            yield connection

    def close(self) -> None:
        """Give back every connection."""
        self._engine.dispose()

    @contextmanager
    def _transaction(self, *, writes: bool) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection, connection.execution_options(writes=writes).begin():
                yield connection
        except PoolTimeout as error:
            raise StoreUnavailable(f"no free connection to the database {self.name}; try again") from error
        except DBAPIError as error:
            raise _wrapped(error, self.name) from error
        except SQLAlchemyError as error:
            raise StoreFault(f"the database {self.name} cannot do this: {_first_line(error)}") from error

    def _upgrade(self, migrations: Sequence[Migration]) -> None:
        with self.write() as connection:
            if not self._is_sqlite:  # SQLite's write lock is held already
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
            connection.execute(text("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL)"))
            found = connection.execute(text("SELECT version FROM schema_version")).scalar()
            version = int(found or 0)
            if version > len(migrations):
                raise StoreFault(
                    f"the database {self.name} has schema version {version}, this program knows up to "
                    f"{len(migrations)}; run the newer program"
                )
            for migration in migrations[version:]:
                migration(connection)
            statement = (
                "INSERT INTO schema_version VALUES (:v)" if found is None else "UPDATE schema_version SET version = :v"
            )
            connection.execute(text(statement), {"v": len(migrations)})
        if version < len(migrations):
            logger.info("database %s: schema version %d -> %d", self.name, version, len(migrations))


def utc_now() -> datetime:
    """The time now, with its zone."""
    return datetime.now(UTC)


def to_us(moment: datetime) -> int:
    """Microseconds since 1970 UTC.  moment: with its zone."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def from_us(microseconds: int) -> datetime:
    """What `to_us` was given."""
    return _EPOCH + timedelta(microseconds=microseconds)


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreFault("the database must be a URL, such as sqlite:///voices.db or postgresql://host/name") from error
    if parsed.drivername in ("postgres", "postgresql"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "postgresql+psycopg"):
        raise StoreFault(f"the database must be sqlite:// or postgresql://, got {parsed.drivername}://")
    return parsed


def _sqlite(url: URL) -> Engine:
    in_memory = not url.database or url.database == ":memory:"
    if not in_memory and not Path(str(url.database)).parent.is_dir():
        raise StoreFault(f"the folder of the database {url.database} does not exist; make it first")
    engine = create_engine(
        url,
        poolclass=QueuePool,
        # A database in memory lives in its one connection, which threads take in turns.
        pool_size=1 if in_memory else _POOL_SIZE,
        max_overflow=0,
        connect_args={"check_same_thread": False, "timeout": _BUSY_TIMEOUT_S},
    )

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: object) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _postgresql(url: URL) -> Engine:
    return create_engine(
        url,
        pool_size=_POOL_SIZE,
        max_overflow=0,
        pool_pre_ping=True,  # a server that was restarted costs no request
        connect_args={"connect_timeout": 10, "application_name": "slackwater"},
    )


def _wrapped(error: DBAPIError, name: str) -> TemporaryError | StoreFault:
    cause = error.orig
    line = _first_line(cause or error)[:300]
    sqlite_code = getattr(cause, "sqlite_errorname", None)
    state = getattr(cause, "sqlstate", None)
    if sqlite_code is not None:
        is_temporary = str(sqlite_code).startswith(_TEMPORARY_SQLITE)
    elif state is not None:
        is_temporary = state.startswith(_TEMPORARY_CLASSES)
    else:  # there is no connection: FATAL is the server's own no, anything else that it does not answer
        is_temporary = "FATAL:" not in str(cause) or any(word in str(cause) for word in _NOT_NOW)
    if is_temporary:
        return StoreUnavailable(f"the database {name} cannot serve now: {line}", retry_after_s=5.0)
    return StoreFault(f"the database {name} refuses: {line}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
