"""Opening, upgrading and failing databases."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from slackwater_inference.store.database import MEMORY_URL, Database
from slackwater_inference.store.errors import StoreFault, StoreUnavailable
from slackwater_inference.store.tables import MIGRATIONS


def _add_colour(connection):
    connection.execute(text("ALTER TABLE voices ADD COLUMN colour TEXT"))


def _fail(connection):
    connection.execute(text("CREATE TABLE half_made (x INTEGER)"))
    connection.execute(text("INSERT INTO nowhere VALUES (1)"))


def test_an_older_database_is_upgraded_and_keeps_its_rows(database_url):
    database = Database(database_url)
    with database.write() as connection:
        connection.execute(text("INSERT INTO objects VALUES ('aa', 3, 4)"))
    database.close()

    database = Database(database_url, [*MIGRATIONS, _add_colour])

    with database.read() as connection:
        assert connection.execute(text("SELECT size_bytes FROM objects")).scalar_one() == 3
        assert connection.execute(text("SELECT colour FROM voices")).all() == []
        assert connection.execute(text("SELECT version FROM schema_version")).all() == [(2,)]
    database.close()


def test_an_upgrade_that_fails_leaves_the_database_as_it_was(database_url):
    Database(database_url).close()

    with pytest.raises(StoreFault, match="nowhere"):
        Database(database_url, [*MIGRATIONS, _fail])

    database = Database(database_url)
    with database.read() as connection:
        assert connection.execute(text("SELECT version FROM schema_version")).all() == [(1,)]
    with pytest.raises(StoreFault, match="half_made"), database.read() as connection:
        connection.execute(text("SELECT * FROM half_made"))
    database.close()


def test_a_newer_database_is_left_alone(database_url):
    Database(database_url, [*MIGRATIONS, _add_colour]).close()

    with pytest.raises(StoreFault, match="schema version 2, this program knows up to 1"):
        Database(database_url)


def test_processes_that_start_at_once_upgrade_once(database_url):
    with ThreadPoolExecutor(4) as threads:
        opened = list(threads.map(Database, [database_url] * 4))

    with opened[0].read() as connection:
        assert connection.execute(text("SELECT version FROM schema_version")).all() == [(1,)]
    for database in opened:
        database.close()


def test_a_block_that_raises_writes_nothing(database_url):
    database = Database(database_url)

    def fail_half_way():
        with database.write() as connection:
            connection.execute(text("INSERT INTO objects VALUES ('aa', 3, 4)"))
            raise KeyError

    with pytest.raises(KeyError):
        fail_half_way()

    with database.read() as connection:
        assert connection.execute(text("SELECT * FROM objects")).all() == []
    database.close()


def test_a_database_in_memory_is_one_for_all_threads():
    database = Database(MEMORY_URL)

    def write(number):
        with database.write() as connection:
            connection.execute(text("INSERT INTO objects VALUES (:digest, 1, 1)"), {"digest": str(number)})

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(20)))

    with database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM objects")).scalar_one() == 20
    database.close()


def test_a_reader_is_not_kept_waiting_by_a_writer(database_url):
    database = Database(database_url)
    has_read = threading.Event()

    def read():
        with database.read() as connection:
            connection.execute(text("SELECT count(*) FROM objects")).scalar_one()
        has_read.set()

    with database.write() as connection:
        connection.execute(text("INSERT INTO objects VALUES ('aa', 3, 4)"))
        reader = threading.Thread(target=read)
        reader.start()
        assert has_read.wait(10)
    reader.join()
    database.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        pytest.param("voices.db", "must be a URL", id="a path"),
        pytest.param("mysql://host/name", "sqlite:// or postgresql://", id="another database"),
        pytest.param("sqlite:////no/such/folder/voices.db", "does not exist; make it first", id="no folder"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_in_one_line(url, words):
    with pytest.raises(StoreFault, match=words) as caught:
        Database(url)

    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "voices.db").write_text("dear diary, " * 100)

    with pytest.raises(StoreFault, match="not a database"):
        Database(f"sqlite:///{tmp_path / 'voices.db'}")


def test_a_server_that_does_not_answer_can_be_tried_again_and_no_password_is_shown(unused_tcp_port):
    with pytest.raises(StoreUnavailable) as caught:
        Database(f"postgresql://me:hunter2@127.0.0.1:{unused_tcp_port}/voices?password=hunter2")

    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_database_that_the_server_does_not_have_is_a_fault(new_postgresql_database):
    url = new_postgresql_database().replace("/postgres?", "/nowhere?")

    with pytest.raises(StoreFault, match="does not exist"):
        Database(url)
