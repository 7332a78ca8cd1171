"""`slackwater engine keys`, on a database of its own."""

import pytest
import typer
from typer.testing import CliRunner

from slackwater_inference.commands.keys import app
from slackwater_inference.store.database import Database
from slackwater_inference.store.keys import KeyStore


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'engine.db'}"


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_key_is_shown_once_alone_on_its_line_and_works(url):
    made = run("add", "laptop", "--database", url, "--tier", "elevated", "--credit", "2.50", "--requests-per-minute", 9)

    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    found = KeyStore(Database(url)).find(key)
    assert (found.name, found.max_concurrent, found.requests_per_minute, str(found.credit)) == ("laptop", 15, 9, "2.5")
    assert found.key_id in made.stderr
    listed = run("list", "--database", url)
    assert key not in listed.output
    assert found.key_id in listed.output
    assert "$2.5 left" in listed.output


def test_a_revoked_key_is_listed_as_revoked(url):
    key = run("add", "laptop", "--database", url).stdout.strip()
    keys = KeyStore(Database(url))
    key_id = keys.find(key).key_id

    assert run("revoke", key_id, "--database", url).exit_code == 0

    assert keys.find(key) is None
    assert "revoked" in run("list", "--database", url).output


def test_credit_is_added(url):
    key = run("add", "laptop", "--database", url, "--credit", "1").stdout.strip()
    key_id = KeyStore(Database(url)).find(key).key_id

    added = run("credit", key_id, "0.25", "--database", url)

    assert added.stdout.strip() == f"{key_id} has $1.25"


def test_two_keys_of_one_user_see_the_same_voices(url):
    first, second = (run("add", name, "--database", url, "--user", "ann").stdout.strip() for name in ("one", "two"))

    keys = KeyStore(Database(url))
    assert keys.find(first).user_id == keys.find(second).user_id == "ann"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["add", "x", "--tier", "gold"], "starter, elevated, high-volume", id="tier"),
        pytest.param(["add", " "], "a name has", id="no name"),
        pytest.param(["add", "x", "--credit", "much"], "must be a number", id="credit"),
        pytest.param(["add", "x", "--credit", "-1"], "between 0 and", id="negative credit"),
        pytest.param(["revoke", "0" * 32], "no key in force", id="unknown key"),
        pytest.param(["credit", "0" * 32, "1"], "no key with the id", id="credit of an unknown key"),
    ],
)
def test_bad_input_is_one_line(url, arguments, words):
    with pytest.raises(typer.BadParameter) as caught:
        CliRunner().invoke(app, [*arguments, "--database", url], standalone_mode=False, catch_exceptions=False)

    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_database_that_cannot_be_opened_is_said_in_one_line():
    with pytest.raises(typer.BadParameter, match="must be a URL"):
        CliRunner().invoke(app, ["list", "--database", "keys.db"], standalone_mode=False, catch_exceptions=False)
