"""The tables, and how an older schema becomes the present one.

Owns names, types and the list of migrations; `database` applies it.  Money is whole nano-dollars and time whole
microseconds since 1970 UTC, since SQLite has neither decimals nor time zones.
"""

from collections.abc import Callable, Sequence

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

Migration = Callable[[Connection], None]

metadata = MetaData()

_Serial = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows itself only for INTEGER

keys = Table(
    "keys",
    metadata,
    Column("key_id", String(32), primary_key=True),
    Column("sha256", String(64), nullable=False, unique=True),  # of the whole key; the key itself is never kept
    Column("name", Text, nullable=False),
    Column("user_id", String(64), nullable=False),
    Column("tier", String(32), nullable=False),
    Column("max_concurrent", Integer, nullable=False),
    Column("requests_per_minute", Integer),  # NULL: no limit
    Column("credit_nano", BigInteger),  # NULL: unmetered
    Column("top_up_nano", BigInteger, nullable=False),
    Column("is_admin", Boolean, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("updated_us", BigInteger, nullable=False),
    Column("revoked_us", BigInteger),
)

# Append-only.
usage = Table(
    "usage",
    metadata,
    Column("usage_id", _Serial, primary_key=True, autoincrement=True),
    Column("key_id", String(32), ForeignKey("keys.key_id"), nullable=False),
    Column("model", String(64), nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("price_nano", BigInteger, nullable=False),  # of a million bytes
    Column("cost_nano", BigInteger, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Index("usage_by_key", "key_id", "created_us"),
)

# One row for each object that is or will be in the object store.  Whoever makes or drops a reference to an
# object locks its row first, so that nothing is deleted while somebody begins to use it.
objects = Table(
    "objects",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_us", BigInteger, nullable=False),
)

voices = Table(
    "voices",
    metadata,
    Column("voice_id", String(32), primary_key=True),
    Column("owner_id", String(64), nullable=False),
    Column("owner_name", Text, nullable=False),
    Column("title", Text, nullable=False),
    Column("title_folded", Text, nullable=False),  # case-folded here, since SQLite folds ASCII only
    Column("description", Text, nullable=False),
    Column("visibility", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("cover_digest", String(64), ForeignKey("objects.digest")),
    Column("cover_media_type", String(64)),
    Column("task_count", BigInteger, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("updated_us", BigInteger, nullable=False),
    Index("voices_by_owner", "owner_id", "created_us"),
    Index("voices_by_cover", "cover_digest"),
)

samples = Table(
    "samples",
    metadata,
    Column("voice_id", String(32), ForeignKey("voices.voice_id", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("digest", String(64), ForeignKey("objects.digest"), nullable=False),
    Column("text", Text, nullable=False),
    Column("media_type", String(64), nullable=False),
    Column("duration_s", Float, nullable=False),
    Index("samples_by_digest", "digest"),
)

labels = Table(
    "labels",
    metadata,
    Column("voice_id", String(32), ForeignKey("voices.voice_id", ondelete="CASCADE"), primary_key=True),
    Column("kind", String(16), primary_key=True),  # tag, language or title_language
    Column("position", Integer, primary_key=True),
    Column("value", Text, nullable=False),
    Index("labels_by_value", "kind", "value"),
)


def _create_first_tables(connection: Connection) -> None:
    metadata.create_all(connection, tables=[keys, usage, objects, voices, samples, labels])


# Version n of the schema is what the first n migrations make.  Never change one that was released: append.
MIGRATIONS: Sequence[Migration] = (_create_first_tables,)
