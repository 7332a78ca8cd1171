"""Content-addressed objects in a folder, in memory, and on a server that speaks S3."""

import hashlib
import os
import stat
import subprocess
import sys

import pytest

from slackwater_inference.store.errors import NotFound, StoreFault, StoreUnavailable
from slackwater_inference.store.objects import MEMORY_URL, ObjectStore


@pytest.fixture(params=["memory", "folder", "s3"])
def objects(request, tmp_path):
    match request.param:
        case "memory":
            return ObjectStore(MEMORY_URL)
        case "folder":
            return ObjectStore(str(tmp_path / "made" / "on demand"))
        case _:
            endpoint = request.getfixturevalue("s3_endpoint")
            return ObjectStore(f"s3://voices/{tmp_path.name}?endpoint={endpoint}&region=us-east-1")


def test_bytes_come_back_by_their_digest(objects):
    data = os.urandom(1000)

    digest = objects.put(data)

    assert digest == hashlib.sha256(data).hexdigest()
    assert objects.get(digest) == data


def test_large_and_empty_objects_come_back_whole(objects):
    large = os.urandom(6 * 1024 * 1024)  # the client sends more than 5 MiB in several parts

    assert objects.get(objects.put(large)) == large
    assert objects.get(objects.put(b"")) == b""


def test_the_same_bytes_are_one_object(objects):
    digest = objects.put(b"hello")

    assert objects.put(b"hello") == digest
    objects.delete(digest)
    with pytest.raises(NotFound):
        objects.get(digest)


def test_deleting_takes_what_was_derived_along_and_nothing_else(objects):
    first, second = objects.put(b"one"), objects.put(b"two")
    objects.put_derived(first, "codec-a", b"codes")
    objects.put_derived(first, "codec-b", b"other codes")
    objects.put_derived(second, "codec-a", b"codes of two")

    objects.delete(first)
    objects.delete(first)  # a second time is no error

    assert objects.get_derived(first, "codec-a") is objects.get_derived(first, "codec-b") is None
    assert objects.get_derived(second, "codec-a") == b"codes of two"
    assert objects.get(second) == b"two"


def test_a_damaged_object_is_said_to_be_damaged(tmp_path):
    objects = ObjectStore(str(tmp_path))
    digest = objects.put(b"hello")
    (tmp_path / "objects" / digest[:2] / digest).write_bytes(b"hullo")

    with pytest.raises(StoreFault, match="damaged"):
        objects.get(digest)

    objects.put(b"hello")  # puts it right
    assert objects.get(digest) == b"hello"


def test_a_damaged_derived_object_is_made_anew_by_its_caller(tmp_path):
    objects = ObjectStore(str(tmp_path))
    digest = objects.put(b"hello")
    objects.put_derived(digest, "codec", b"codes")
    path = tmp_path / "derived" / digest / "codec"
    path.write_bytes(path.read_bytes()[:-1] + b"X")

    assert objects.get_derived(digest, "codec") is None


def test_a_folder_holds_no_partial_file_and_no_executable(tmp_path):
    digest = ObjectStore(str(tmp_path)).put(b"hello")

    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in files] == [digest]
    assert not files[0].stat().st_mode & (stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


def test_two_stores_on_one_folder_see_each_others_objects(tmp_path):
    digest = ObjectStore(str(tmp_path)).put(b"hello")

    assert ObjectStore(tmp_path.as_uri()).get(digest) == b"hello"


def test_a_missing_bucket_is_said_at_the_start(s3_endpoint):
    with pytest.raises(StoreFault, match="no such bucket"):
        ObjectStore(f"s3://nowhere?endpoint={s3_endpoint}&region=us-east-1")


def test_a_wrong_secret_is_said_at_the_start(s3_endpoint, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")

    with pytest.raises(StoreFault, match="no permission") as caught:
        ObjectStore(f"s3://voices?endpoint={s3_endpoint}&region=us-east-1")

    assert "wrong" not in str(caught.value)


def test_a_server_that_does_not_answer_can_be_tried_again(unused_tcp_port, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    with pytest.raises(StoreUnavailable, match="s3://voices now"):
        ObjectStore(f"s3://voices?endpoint=http://127.0.0.1:{unused_tcp_port}&region=us-east-1")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        pytest.param("gs://bucket", "a folder, file://, s3:// or memory://", id="another cloud"),
        pytest.param("s3://", "no bucket", id="no bucket"),
        pytest.param("s3://bucket?color=red", "got color", id="unknown option"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_in_one_line(url, words):
    with pytest.raises(StoreFault, match=words) as caught:
        ObjectStore(url)

    assert "\n" not in str(caught.value)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(StoreFault, match="is a file"):
        ObjectStore(str(tmp_path / "file"))


def test_a_full_disk_can_be_tried_again_later(tmp_path):
    small_disk = 'mount -t tmpfs -o size=64k tmpfs "$1" && exec "$2" -c "$3" "$1"'
    write = (
        "import sys\n"
        "from slackwater_inference.store.errors import StoreUnavailable\n"
        "from slackwater_inference.store.objects import ObjectStore\n"
        "objects = ObjectStore(sys.argv[1])\n"
        "kept = objects.put(b'small')\n"
        "try:\n    objects.put(bytes(200_000))\n"
        "except StoreUnavailable as error:\n    sys.stdout.write(str(error))\n"
        "assert objects.get(kept) == b'small'\n"
    )
    own_mounts = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*own_mounts, "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a small disk")

    done = subprocess.run(
        [*own_mounts, "sh", "-c", small_disk, "sh", tmp_path, sys.executable, write], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == f"cannot write {tmp_path}: the disk is full"
