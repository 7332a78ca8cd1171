"""Voice models in the database and the object store, on both databases."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from slackwater_inference.store.database import Database
from slackwater_inference.store.errors import Forbidden, NotFound, StoreFault, StoreUnavailable
from slackwater_inference.store.objects import MEMORY_URL, ObjectStore
from slackwater_inference.store.records import (
    Image,
    NewSample,
    NewVoice,
    SampleKind,
    SortBy,
    Visibility,
    VoiceChanges,
    VoiceQuery,
)
from slackwater_inference.store.voices import VoiceStore

EVERYBODY = VoiceQuery()
PNG = Image(b"\x89PNG", "image/png")


class Clock:
    """A clock that is moved; each look at it is a second later."""

    def __init__(self):
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self):
        self.now += timedelta(seconds=1)
        return self.now


class FailingObjects(ObjectStore):
    """An object store whose disk is full."""

    def put(self, data):
        raise StoreUnavailable("the disk is full")


@pytest.fixture
def database(database_url):
    database = Database(database_url)
    yield database
    database.close()


@pytest.fixture
def objects():
    return ObjectStore(MEMORY_URL)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def voices(database, objects, clock):
    return VoiceStore(database, objects, clock)


def a_sample(data=b"a recording", text="hello", **more):
    return NewSample(data, text, "audio/wav", 2.5, **more)


def a_voice(owner="ann", **more):
    return NewVoice(
        **({"owner_id": owner, "owner_name": owner.title(), "title": "Voice", "samples": [a_sample()]} | more)
    )


def titles(page):
    return [record.title for record in page.items]


def test_a_voice_comes_back_as_it_was_made(voices):
    made = voices.create(
        a_voice(
            title="Grandma",
            samples=[a_sample(b"one", "first"), a_sample(b"two", "second"), a_sample(b"3", kind=SampleKind.GENERATED)],
            description="warm",
            visibility=Visibility.UNLIST,
            tags=["warm", "old", "warm"],
            languages=["de", "en"],
            cover=PNG,
        )
    )

    assert voices.get(made.voice_id, "bob") == made
    assert (made.title, made.description, made.owner_id, made.owner_name) == ("Grandma", "warm", "ann", "Ann")
    assert (made.tags, made.languages, made.state) == (("warm", "old"), ("de", "en"), "trained")
    assert [(sample.text, voices.data(sample.digest)) for sample in made.recordings] == [
        ("first", b"one"),
        ("second", b"two"),
    ]
    assert voices.data(made.cover_digest) == PNG.data


def test_a_voice_may_keep_the_id_that_it_had_elsewhere(voices):
    made = voices.create(a_voice(voice_id="ca3007f96ae7499ab87d27ea3599956a"))

    assert made.voice_id == "ca3007f96ae7499ab87d27ea3599956a"
    with pytest.raises(StoreFault):
        voices.create(a_voice(voice_id=made.voice_id))
    assert voices.get(made.voice_id, "ann") == made


@pytest.mark.parametrize(
    ("visibility", "is_listed", "is_seen"),
    [(Visibility.PUBLIC, True, True), (Visibility.UNLIST, False, True), (Visibility.PRIVATE, False, False)],
)
def test_others_see_what_the_visibility_lets_them(voices, visibility, is_listed, is_seen):
    made = voices.create(a_voice("ann", visibility=visibility))

    assert voices.get(made.voice_id, "ann") == made
    assert (made in voices.list(EVERYBODY, "bob").items) == is_listed
    assert made in voices.list(VoiceQuery(own_only=True), "ann").items
    assert voices.list(VoiceQuery(own_only=True), "bob").items == ()
    if is_seen:
        assert voices.get(made.voice_id, "bob") == made
    else:
        with pytest.raises(Forbidden):
            voices.get(made.voice_id, "bob")


@pytest.mark.parametrize("voice_id", ["0" * 32, "", "no id", "a\0b", "\udc80", "0" * 100_000])
def test_what_is_no_voice_is_not_found(voices, voice_id):
    with pytest.raises(NotFound) as caught:
        voices.get(voice_id, "ann")

    assert len(str(caught.value)) < 400


def test_only_the_owner_or_an_admin_changes_and_deletes(voices):
    made = voices.create(a_voice("ann"))

    with pytest.raises(Forbidden):
        voices.update(made.voice_id, "bob", VoiceChanges(title="Mine"))
    with pytest.raises(Forbidden):
        voices.delete(made.voice_id, "bob")

    assert voices.update(made.voice_id, "bob", VoiceChanges(title="Moderated"), is_admin=True).title == "Moderated"
    voices.delete(made.voice_id, "bob", is_admin=True)
    with pytest.raises(NotFound):
        voices.get(made.voice_id, "ann")


def test_an_update_changes_what_it_names_and_nothing_else(voices):
    made = voices.create(a_voice(tags=["old"], description="first", languages=["en"]))

    after = voices.update(
        made.voice_id, "ann", VoiceChanges(title="New", tags=["young"], visibility=Visibility.PRIVATE, cover=PNG)
    )

    assert after.updated_at > made.updated_at
    assert after == replace(
        made,
        title="New",
        tags=("young",),
        visibility=Visibility.PRIVATE,
        cover_digest=after.cover_digest,
        cover_media_type="image/png",
        updated_at=after.updated_at,
    )
    assert voices.update(made.voice_id, "ann", VoiceChanges(tags=[])).tags == ()


def test_a_new_cover_takes_the_place_of_the_old_one(voices, objects):
    made = voices.create(a_voice(cover=PNG))

    voices.update(made.voice_id, "ann", VoiceChanges(cover=Image(b"GIF89a", "image/gif")))

    with pytest.raises(NotFound):
        objects.get(made.cover_digest)


def test_deleting_a_voice_removes_the_objects_that_nobody_else_refers_to(voices, objects):
    first = voices.create(
        a_voice(samples=[a_sample(b"shared"), a_sample(b"own", derived={"codec": b"codes"})], cover=PNG)
    )
    second = voices.create(a_voice(samples=[a_sample(b"shared")], cover=PNG))
    shared, own = (sample.digest for sample in first.samples)

    voices.delete(first.voice_id, "ann")

    assert objects.get(shared) == b"shared"
    assert objects.get(second.cover_digest) == PNG.data
    with pytest.raises(NotFound):
        objects.get(own)
    assert objects.get_derived(own, "codec") is None
    voices.delete(second.voice_id, "ann")
    with pytest.raises(NotFound):
        objects.get(shared)


def test_what_is_derived_is_kept_only_while_a_voice_refers_to_the_recording(voices):
    made = voices.create(a_voice())
    digest = made.samples[0].digest

    voices.keep_derived(digest, "codec", b"codes")
    assert voices.derived(digest, "codec") == b"codes"
    voices.delete(made.voice_id, "ann")
    voices.keep_derived(digest, "codec", b"codes, encoded by somebody who was slow")

    assert voices.derived(digest, "codec") is None


def test_a_voice_whose_files_cannot_be_kept_leaves_nothing_behind(database, voices):
    failing = VoiceStore(database, FailingObjects(MEMORY_URL))

    with pytest.raises(StoreUnavailable):
        failing.create(a_voice())

    assert voices.list(VoiceQuery(own_only=True), "ann").total == 0
    with database.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM objects").scalar_one() == 0
        assert connection.exec_driver_sql("SELECT count(*) FROM samples").scalar_one() == 0


def test_an_update_whose_cover_cannot_be_kept_changes_nothing(database, voices):
    made = voices.create(a_voice())

    with pytest.raises(StoreUnavailable):
        VoiceStore(database, FailingObjects(MEMORY_URL)).update(
            made.voice_id, "ann", VoiceChanges(title="x", cover=PNG)
        )

    assert voices.get(made.voice_id, "ann") == made


def test_a_voice_that_a_dead_process_was_making_is_invisible_and_swept_away(database, voices, objects, clock):
    made = voices.create(a_voice(samples=[a_sample(b"half")]))
    with database.write() as connection:  # as it is between the first step of `create` and the last
        connection.exec_driver_sql("UPDATE voices SET state = 'created'")

    with pytest.raises(NotFound):
        voices.get(made.voice_id, "ann")
    voices.sweep()
    assert objects.get(made.samples[0].digest) == b"half"  # it may still be in the making

    clock.now += timedelta(hours=2)
    voices.sweep()

    with pytest.raises(NotFound):
        objects.get(made.samples[0].digest)


def test_voices_are_deleted_and_made_of_the_same_recording_at_once_without_loss(voices, objects):
    """The one order that must not happen: a recording is found to be unused, is used, and is deleted."""
    rounds, failures = 12, []

    def remake(owner):
        made = voices.create(a_voice(owner))
        for _ in range(rounds):
            voices.delete(made.voice_id, owner)
            made = voices.create(a_voice(owner))
            try:
                objects.get(made.samples[0].digest)
            except NotFound as error:
                failures.append(error)

    threads = [threading.Thread(target=remake, args=(owner,)) for owner in ("ann", "bob", "cat")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert voices.list(EVERYBODY, "ann").total == 3


def test_pages_hold_every_voice_once(voices):
    for number in range(7):
        voices.create(a_voice(title=str(number)))

    pages = [voices.list(VoiceQuery(page_size=3, page_number=page), "bob") for page in (1, 2, 3, 4)]

    assert [page.total for page in pages] == [7, 7, 7, 7]
    assert [len(page.items) for page in pages] == [3, 3, 1, 0]
    assert [page.has_more for page in pages] == [True, True, False, False]
    assert sorted(title for page in pages for title in titles(page)) == list("0123456")


def test_a_list_is_ordered_by_use_or_by_age(voices):
    old, middle, _ = (voices.create(a_voice(title=title)) for title in ("old", "middle", "young"))

    voices.count_tasks({old.voice_id: 2, middle.voice_id: 1, "0" * 32: 5})

    assert titles(voices.list(VoiceQuery(sort_by=SortBy.CREATED_AT), "bob")) == ["young", "middle", "old"]
    assert titles(voices.list(VoiceQuery(sort_by=SortBy.TASK_COUNT), "bob")) == ["old", "middle", "young"]
    assert titles(voices.list(VoiceQuery(sort_by=SortBy.SCORE), "bob")) == ["old", "middle", "young"]
    assert voices.get(old.voice_id, "bob").task_count == 2


@pytest.mark.parametrize(
    ("query", "found"),
    [
        pytest.param(VoiceQuery(title="strasse"), ["GROSSE STRASSE", "Große Straße"], id="title in any case"),
        pytest.param(VoiceQuery(title="100%"), ["100% me"], id="a wildcard is a letter"),
        pytest.param(VoiceQuery(title="_"), [], id="so is the other one"),
        pytest.param(VoiceQuery(tags=["calm"]), ["100% me", "Große Straße"], id="a tag"),
        pytest.param(VoiceQuery(tags=["calm", "low"]), ["Große Straße"], id="all tags"),
        pytest.param(VoiceQuery(languages=["de", "fr"]), ["100% me", "Große Straße"], id="any language"),
        pytest.param(VoiceQuery(title_languages=["de"]), ["GROSSE STRASSE"], id="the title's language"),
        pytest.param(VoiceQuery(author_id="bob"), ["100% me"], id="author"),
        pytest.param(VoiceQuery(author_id="ann", tags=["calm"]), ["Große Straße"], id="several"),
    ],
)
def test_a_list_holds_what_matches(voices, query, found):
    voices.create(a_voice("ann", title="Große Straße", tags=["calm", "low"], languages=["de"]))
    voices.create(a_voice("ann", title="GROSSE STRASSE", title_languages=["de"]))
    voices.create(a_voice("bob", title="100% me", tags=["calm"], languages=["en", "fr"]))

    assert sorted(titles(voices.list(query, "cat"))) == sorted(found)


def test_uses_that_are_counted_at_once_all_count(voices):
    made = voices.create(a_voice())

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(voices.count_tasks, [{made.voice_id: 1}] * 20))

    assert voices.get(made.voice_id, "ann").task_count == 20
