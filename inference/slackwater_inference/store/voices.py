"""Voice models in the database and the object store.

Owns a voice's life: create, get, list, update, delete, and the objects that only it refers to.  Does not check or
encode audio (cloning) and owns no HTTP (api.voices).  Every call blocks; callers on a loop make it in a thread.
"""

import hashlib
import logging
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, delete, exists, func, insert, select, text, update

from slackwater_inference.store import tables
from slackwater_inference.store.database import Database, from_us, to_us, utc_now
from slackwater_inference.store.errors import Forbidden, NotFound
from slackwater_inference.store.objects import ObjectStore
from slackwater_inference.store.records import (
    NewSample,
    NewVoice,
    Sample,
    SampleKind,
    SortBy,
    Visibility,
    VoiceChanges,
    VoicePage,
    VoiceQuery,
    VoiceRecord,
)

logger = logging.getLogger(__name__)

# A voice that is being made for longer than this was left by a process that died.
_ABANDONED_AFTER = timedelta(hours=1)
_VOICE_ID = re.compile(r"[0-9a-f]{32}")
_MAKING, _TRAINED = "created", "trained"  # two of the hosted states
_TAG, _LANGUAGE, _TITLE_LANGUAGE = "tag", "language", "title_language"


class VoiceStore:
    """The voices of one database and object store.

    user_id: who asks.  A voice that is private is another user's business: Forbidden, as the hosted API has it.
    is_admin: may change and delete every voice.
    """

    def __init__(self, database: Database, objects: ObjectStore, now: Callable[[], datetime] = utc_now) -> None:
        self._database = database
        self._objects = objects
        self._now = now

    def create(self, new: NewVoice) -> VoiceRecord:
        """Store a voice with its samples and cover; all of it or nothing."""
        voice_id = new.voice_id or uuid.uuid4().hex
        files = [sample.data for sample in new.samples] + ([new.cover.data] if new.cover else [])
        now_us = to_us(self._now())
        # The rows come first: from then on nobody deletes these objects.  Until the last step the state says that
        # the voice is being made, so nobody sees it, and `sweep` takes it away should this process die.
        with self._database.write() as connection:
            _claim(connection, files, now_us)
            connection.execute(insert(tables.voices).values(**_voice_row(voice_id, new, now_us)))
            connection.execute(insert(tables.samples), _sample_rows(voice_id, new.samples))
            _set_labels(connection, voice_id, _TAG, new.tags)
            _set_labels(connection, voice_id, _LANGUAGE, new.languages)
            _set_labels(connection, voice_id, _TITLE_LANGUAGE, new.title_languages)
        try:
            for data in files:
                self._objects.put(data)
            for sample in new.samples:
                for name, derived in sample.derived.items():
                    self._objects.put_derived(hashlib.sha256(sample.data).hexdigest(), name, derived)
            with self._database.write() as connection:
                _of(connection, update(tables.voices), voice_id, state=_TRAINED)
                return _read_one(connection, voice_id)
        except BaseException:
            self._remove(voice_id)
            raise

    def get(self, voice_id: str, user_id: str) -> VoiceRecord:
        """The voice, if the user may see it.  Raises NotFound, Forbidden."""
        with self._database.read() as connection:
            record = _read_one(connection, voice_id)
        if not record.is_visible_to(user_id):
            raise Forbidden(f"the voice {voice_id} is private")
        return record

    def get_any(self, voice_id: str) -> VoiceRecord:
        """The voice, whoever's it is: for an admin.  Raises NotFound."""
        with self._database.read() as connection:
            return _read_one(connection, voice_id)

    def list(self, query: VoiceQuery, user_id: str) -> VoicePage:
        """One page of the voices that match."""
        voices = tables.voices
        where = _conditions(query, user_id)
        order = [] if query.sort_by is SortBy.CREATED_AT else [voices.c.task_count.desc()]
        num_before = (query.page_number - 1) * query.page_size
        with self._database.read() as connection:
            total = connection.execute(select(func.count()).select_from(voices).where(*where)).scalar_one()
            rows = connection.execute(
                select(voices)
                .where(*where)
                .order_by(*order, voices.c.created_us.desc(), voices.c.voice_id)
                .limit(query.page_size)
                .offset(num_before)
            )
            items = _records(connection, rows.mappings().all())
        return VoicePage(total, items, has_more=num_before + len(items) < total)

    def update(self, voice_id: str, user_id: str, changes: VoiceChanges, *, is_admin: bool = False) -> VoiceRecord:
        """Change what `changes` names.  Raises NotFound, Forbidden unless the voice is the user's."""
        now_us = to_us(self._now())
        with self._database.write() as connection:
            before = _read_one(connection, voice_id, lock=True)
            _check_owner(before, user_id, is_admin)
            if changes.cover:
                _claim(connection, [changes.cover.data], now_us)
            _of(connection, update(tables.voices), voice_id, **_changed_columns(changes), updated_us=now_us)
            if changes.tags is not None:
                _set_labels(connection, voice_id, _TAG, changes.tags)
            if changes.title_languages is not None:
                _set_labels(connection, voice_id, _TITLE_LANGUAGE, changes.title_languages)
            if changes.cover:
                self._objects.put(changes.cover.data)  # before the commit: a cover that failed changes nothing
            after = _read_one(connection, voice_id)
        if before.cover_digest and before.cover_digest != after.cover_digest:
            self._collect([before.cover_digest])
        return after

    def delete(self, voice_id: str, user_id: str, *, is_admin: bool = False) -> VoiceRecord:
        """Delete the voice and every object that no other voice refers to; returns what it was.

        Raises NotFound, Forbidden unless the voice is the user's.
        """
        with self._database.read() as connection:
            record = _read_one(connection, voice_id)
        _check_owner(record, user_id, is_admin)
        self._remove(voice_id)
        return record

    def data(self, digest: str) -> bytes:
        """The bytes of a sample or cover.  Raises NotFound; StoreFault if they are damaged."""
        return self._objects.get(digest)

    def derived(self, digest: str, name: str) -> bytes | None:
        """What `keep_derived` kept, or None if there is no such thing yet."""
        return self._objects.get_derived(digest, name)

    def keep_derived(self, digest: str, name: str, data: bytes) -> None:
        """Keep what was made from a recording, as long as a voice refers to it; nothing if none does any more."""
        with self._database.write() as connection:
            if _lock_object(connection, digest):
                self._objects.put_derived(digest, name, data)

    def count_tasks(self, num_tasks: Mapping[str, int]) -> None:
        """So many more texts were spoken with each of these voices, by id; an id that is gone is left out."""
        voices = tables.voices
        with self._database.write() as connection:
            for voice_id, num in sorted(num_tasks.items()):
                _of(connection, update(voices), voice_id, task_count=voices.c.task_count + num)

    def sweep(self) -> None:
        """Remove what processes that died left behind: half-made voices and objects without a voice.

        Call it at start; it is safe while others work on the same database.
        """
        voices = tables.voices
        before_us = to_us(self._now() - _ABANDONED_AFTER)
        with self._database.read() as connection:
            half_made = connection.execute(
                select(voices.c.voice_id).where(voices.c.state == _MAKING, voices.c.created_us < before_us)
            ).scalars()
            abandoned = [*half_made]
            unused = connection.execute(select(tables.objects.c.digest).where(~_is_referenced(tables.objects.c.digest)))
            digests = [*unused.scalars()]
        for voice_id in abandoned:
            logger.info("removing the half-made voice %s", voice_id)
            self._remove(voice_id)
        self._collect(digests)

    def _remove(self, voice_id: str) -> None:
        with self._database.write() as connection:
            digests = {
                *connection.execute(
                    select(tables.samples.c.digest).where(tables.samples.c.voice_id == voice_id)
                ).scalars(),
                *connection.execute(
                    select(tables.voices.c.cover_digest).where(tables.voices.c.voice_id == voice_id)
                ).scalars(),
            } - {None}
            connection.execute(delete(tables.voices).where(tables.voices.c.voice_id == voice_id))
        self._collect(digests)

    def _collect(self, digests: Iterable[str]) -> None:
        """Delete those of the objects that nobody refers to, each under its row's lock.

        Should the process die between the object and its row, the row stays without a reference, and `sweep` or
        the next voice with this recording puts it right.
        """
        for digest in sorted(digests):
            with self._database.write() as connection:
                if not _lock_object(connection, digest):
                    continue
                # A statement of its own after the lock, so that it sees what was committed while we waited.
                if not connection.execute(select(_is_referenced(digest))).scalar_one():
                    self._objects.delete(digest)
                    connection.execute(delete(tables.objects).where(tables.objects.c.digest == digest))


def _claim(connection: Connection, files: Sequence[bytes], now_us: int) -> None:
    """Have a locked row for each object until the transaction ends.  In one order, so that two never deadlock."""
    sizes = {hashlib.sha256(data).hexdigest(): len(data) for data in files}
    statement = text(
        "INSERT INTO objects (digest, size_bytes, created_us) VALUES (:digest, :size_bytes, :created_us) "
        "ON CONFLICT (digest) DO UPDATE SET size_bytes = excluded.size_bytes"
    )
    for digest, size_bytes in sorted(sizes.items()):
        connection.execute(statement, {"digest": digest, "size_bytes": size_bytes, "created_us": now_us})


def _lock_object(connection: Connection, digest: str) -> bool:
    """Lock the object's row until the transaction ends; False if there is none."""
    found = select(tables.objects.c.digest).where(tables.objects.c.digest == digest).with_for_update()
    return connection.execute(found).scalar_one_or_none() is not None


def _is_referenced(digest: ColumnElement[str] | str) -> ColumnElement[bool]:
    return exists().where(tables.samples.c.digest == digest) | exists().where(tables.voices.c.cover_digest == digest)


def _of(connection: Connection, statement: Any, voice_id: str, **values: object) -> None:
    connection.execute(statement.where(tables.voices.c.voice_id == voice_id).values(**values))


def _check_owner(record: VoiceRecord, user_id: str, is_admin: bool) -> None:
    if record.owner_id != user_id and not is_admin:
        raise Forbidden(f"the voice {record.voice_id} is another user's")


def _conditions(query: VoiceQuery, user_id: str) -> list[ColumnElement[bool]]:
    voices = tables.voices
    where: list[ColumnElement[bool]] = [voices.c.state == _TRAINED]
    if query.own_only:
        where.append(voices.c.owner_id == user_id)
    else:
        where.append(voices.c.visibility == Visibility.PUBLIC.value)
        if query.author_id is not None:
            where.append(voices.c.owner_id == query.author_id)
    if query.title:
        where.append(voices.c.title_folded.contains(query.title.casefold(), autoescape=True))
    where += [_has_label(_TAG, [tag]) for tag in query.tags]
    if query.languages:
        where.append(_has_label(_LANGUAGE, query.languages))
    if query.title_languages:
        where.append(_has_label(_TITLE_LANGUAGE, query.title_languages))
    return where


def _has_label(kind: str, values: Sequence[str]) -> ColumnElement[bool]:
    labels = tables.labels
    return exists().where(
        labels.c.voice_id == tables.voices.c.voice_id, labels.c.kind == kind, labels.c.value.in_(values)
    )


def _set_labels(connection: Connection, voice_id: str, kind: str, values: Sequence[str]) -> None:
    labels = tables.labels
    connection.execute(delete(labels).where(labels.c.voice_id == voice_id, labels.c.kind == kind))
    rows = [
        {"voice_id": voice_id, "kind": kind, "position": position, "value": value}
        for position, value in enumerate(dict.fromkeys(values))
    ]
    if rows:
        connection.execute(insert(labels), rows)


def _voice_row(voice_id: str, new: NewVoice, now_us: int) -> dict[str, Any]:
    return {
        "voice_id": voice_id,
        "owner_id": new.owner_id,
        "owner_name": new.owner_name,
        "title": new.title,
        "title_folded": new.title.casefold(),
        "description": new.description,
        "visibility": new.visibility.value,
        "state": _MAKING,
        "cover_digest": hashlib.sha256(new.cover.data).hexdigest() if new.cover else None,
        "cover_media_type": new.cover.media_type if new.cover else None,
        "task_count": 0,
        "created_us": now_us,
        "updated_us": now_us,
    }


def _sample_rows(voice_id: str, samples: Sequence[NewSample]) -> list[dict[str, Any]]:
    return [
        {
            "voice_id": voice_id,
            "position": position,
            "kind": sample.kind.value,
            "digest": hashlib.sha256(sample.data).hexdigest(),
            "text": sample.text,
            "media_type": sample.media_type,
            "duration_s": sample.duration_s,
        }
        for position, sample in enumerate(samples)
    ]


def _changed_columns(changes: VoiceChanges) -> dict[str, object]:
    columns: dict[str, object] = {}
    if changes.title is not None:
        columns |= {"title": changes.title, "title_folded": changes.title.casefold()}
    if changes.description is not None:
        columns["description"] = changes.description
    if changes.visibility is not None:
        columns["visibility"] = changes.visibility.value
    if changes.cover is not None:
        columns["cover_digest"] = hashlib.sha256(changes.cover.data).hexdigest()
        columns["cover_media_type"] = changes.cover.media_type
    return columns


def _read_one(connection: Connection, voice_id: str, *, lock: bool = False) -> VoiceRecord:
    statement = select(tables.voices).where(tables.voices.c.voice_id == voice_id, tables.voices.c.state == _TRAINED)
    row = None
    if _VOICE_ID.fullmatch(voice_id):  # anything else, a database may not even take as a question
        row = connection.execute(statement.with_for_update() if lock else statement).mappings().one_or_none()
    if row is None:
        raise NotFound(f"there is no voice with the id {voice_id[:64]!r}")
    return _records(connection, [row])[0]


def _records(connection: Connection, rows: Sequence[RowMapping]) -> tuple[VoiceRecord, ...]:
    """The voices of these rows with their samples and labels, which two queries fetch for all of them."""
    ids = [row["voice_id"] for row in rows]
    samples: dict[str, list[Sample]] = {voice_id: [] for voice_id in ids}
    labels: dict[tuple[str, str], list[str]] = {}
    of_ids = select(tables.samples).where(tables.samples.c.voice_id.in_(ids)).order_by(tables.samples.c.position)
    for row in connection.execute(of_ids).mappings():
        samples[row["voice_id"]].append(
            Sample(row["digest"], row["text"], row["media_type"], row["duration_s"], SampleKind(row["kind"]))
        )
    all_labels = select(tables.labels).where(tables.labels.c.voice_id.in_(ids)).order_by(tables.labels.c.position)
    for row in connection.execute(all_labels).mappings():
        labels.setdefault((row["voice_id"], row["kind"]), []).append(row["value"])
    return tuple(
        VoiceRecord(
            voice_id=row["voice_id"],
            owner_id=row["owner_id"],
            owner_name=row["owner_name"],
            title=row["title"],
            description=row["description"],
            visibility=Visibility(row["visibility"]),
            state=row["state"],
            tags=tuple(labels.get((row["voice_id"], _TAG), ())),
            languages=tuple(labels.get((row["voice_id"], _LANGUAGE), ())),
            samples=tuple(samples[row["voice_id"]]),
            cover_digest=row["cover_digest"],
            cover_media_type=row["cover_media_type"],
            task_count=row["task_count"],
            created_at=from_us(row["created_us"]),
            updated_at=from_us(row["updated_us"]),
        )
        for row in rows
    )
