"""`slackwater engine keys`: make, list and revoke API keys, and give them credit.

Owns the command line; the keys are the store's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slackwater_inference.store.keys import KeyStore

app = typer.Typer(help="The API keys of an engine.", no_args_is_help=True, add_completion=False)

_Database = Annotated[str, typer.Option("--database", help="The engine's database: sqlite:///FILE or postgresql://…")]
_KeyId = Annotated[str, typer.Argument(help="The key's id, as `list` shows it.")]


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Whose or what the key is for.")],
    database: _Database,
    tier: Annotated[
        str, typer.Option(help="starter, elevated or high-volume: 5, 15 or 50 requests at once.")
    ] = "starter",
    user: Annotated[str | None, typer.Option(help="The user whose voices it sees; a new one if left out.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Requests at once, instead of the tier's.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="No limit if left out.")] = None,
    credit: Annotated[str | None, typer.Option(help="US dollars to spend; unmetered if left out.")] = None,
    admin: Annotated[bool, typer.Option(help="May see, change and delete everybody's voices.")] = False,
) -> None:
    """Make a key and show it, this once."""
    from slackwater_inference.store.keys import Tier

    if tier not in set(Tier):
        raise typer.BadParameter(f"the tier must be {', '.join(Tier)}, got {tier}")
    if not name.strip() or len(name) > 200 or (user is not None and not 1 <= len(user) <= 64):
        raise typer.BadParameter("a name has 1 to 200 characters, a user 1 to 64")
    with _keys(database) as keys:
        made, plain = keys.add(
            name.strip(),
            tier=Tier(tier),
            user_id=user,
            max_concurrent=max_concurrent,
            requests_per_minute=requests_per_minute,
            credit=None if credit is None else _usd(credit),
            is_admin=admin,
        )
    typer.echo(plain)
    typer.echo(f"id {made.key_id}, user {made.user_id}.  The key is kept nowhere: write it down now.", err=True)


@app.command("list")
def list_keys(database: _Database) -> None:
    """Every key with its limits, its credit and what it has used; never the key itself."""
    with _keys(database) as keys:
        shown = [(key, keys.used(key.key_id)) for key in keys.list()]
    for key, used in shown:
        state = "in force" if key.revoked_at is None else f"revoked {key.revoked_at:%Y-%m-%d}"
        credit = "unmetered" if key.credit is None else f"${key.credit:f} left"
        limits = f"{key.max_concurrent} at once, {key.requests_per_minute or 'any number'} a minute"
        kind = f"{key.tier}, admin" if key.is_admin else str(key.tier)
        typer.echo(
            f"{key.key_id}  {key.name}  user {key.user_id}  {kind}  {limits}  {credit}  "
            f"{used.num_bytes} bytes, ${used.cost:f} used  made {key.created_at:%Y-%m-%d}  {state}"
        )


@app.command()
def revoke(key_id: _KeyId, database: _Database) -> None:
    """Make a key unknown from now on."""
    with _keys(database) as keys:
        keys.revoke(key_id)
    typer.echo(f"revoked {key_id}")


@app.command()
def credit(
    key_id: _KeyId, amount: Annotated[str, typer.Argument(help="US dollars to add.")], database: _Database
) -> None:
    """Add to a key's credit; an unmetered key is metered from then on."""
    with _keys(database) as keys:
        key = keys.top_up(key_id, _usd(amount))
    typer.echo(f"{key_id} has ${key.credit:f}")


@contextmanager
def _keys(url: str) -> "Iterator[KeyStore]":
    """The keys of the database; what they refuse is the caller's bad input."""
    from slackwater_inference.core import EngineError
    from slackwater_inference.store.database import Database
    from slackwater_inference.store.keys import KeyStore

    try:
        database = Database(url)
        try:
            yield KeyStore(database)
        finally:
            database.close()
    except (EngineError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


def _usd(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation as error:
        raise typer.BadParameter(f"US dollars must be a number such as 12.50, got {text}") from error
