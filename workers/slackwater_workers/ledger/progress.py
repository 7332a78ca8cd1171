"""How far a job is, from the ledger's names and rows alone.

Owns no state of the ledger: anyone who can read the folder can ask, with no worker attached.
"""

from dataclasses import dataclass, field

from slackwater_workers.core import Progress, Shard
from slackwater_workers.ledger.index import Index
from slackwater_workers.ledger.parts import Chain, read_chain, read_done, totals
from slackwater_workers.ledger.store import Store


@dataclass(slots=True)
class ProgressReader:
    """Reads progress again and again; a finished shard is read once."""

    store: Store
    _finished: dict[str, dict[str, float]] = field(default_factory=dict)

    def read(self, index: Index | None, shards: tuple[Shard, ...]) -> Progress:
        """Progress over `shards`.  Finished records of open shards count too: a successor keeps them."""
        done = set(self.store.names("done"))
        counts = [self._counts(shard, is_done=shard.name in done) for shard in shards]
        return Progress(
            items_total=None if index is None else len(index.items),
            items_done=int(sum(count["cleaned"] for count in counts)),
            items_quarantined=int(sum(count["quarantined"] for count in counts)),
            audio_s=round(sum(count["audio_s"] for count in counts), 3),
            shards_total=len(shards),
            shards_open=sum(shard.name not in done for shard in shards),
        )

    def _counts(self, shard: Shard, *, is_done: bool) -> dict[str, float]:
        if shard.name in self._finished:
            return self._finished[shard.name]
        if is_done:
            record = read_done(self.store, shard.name)
            assert record is not None, "done-records are never taken back"
            self._finished[shard.name] = record
            return record
        if not self.store.names(f"part/{shard.name}"):
            return totals({})
        chain: Chain = read_chain(self.store, shard.name, check_data=False)
        return totals({unit: row for unit, row in chain.rows.items() if unit in shard.units})
