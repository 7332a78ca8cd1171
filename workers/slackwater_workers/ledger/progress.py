"""How far a job is, from the ledger's names and rows alone.

Owns no state of the ledger: anyone who can read the folder can ask, with no worker attached.
"""

from collections import Counter
from dataclasses import dataclass, field

from slackwater_workers.core import PermanentError, Progress, Shard
from slackwater_workers.ledger.frames import Row
from slackwater_workers.ledger.index import Index
from slackwater_workers.ledger.parts import PartRef, read_done
from slackwater_workers.ledger.store import Store
from slackwater_workers.ledger.tails import Tails


@dataclass(slots=True)
class ProgressReader:
    """Reads progress again and again; a finished shard is read once, and of an open one only what is new.

    follows_workers: count each worker's records too, for which the parts of finished shards are read, once.
    grown: the parts that the newest look found records in, by worker.
    """

    store: Store
    follows_workers: bool = False
    grown: dict[str, set[str]] = field(default_factory=dict)
    _finished: dict[str, Row] = field(default_factory=dict)  # shard -> its done-record
    _open: dict[str, Tails] = field(default_factory=dict)
    _records: Counter[str] = field(default_factory=Counter)  # worker -> its records in finished shards

    def read(self, index: Index | None, shards: tuple[Shard, ...]) -> Progress:
        """Progress over `shards`.  Finished records of open shards count too: a successor keeps them.

        Raises PermanentError when a done-record is damaged.
        """
        self.grown.clear()
        done = set(self.store.names("done"))
        begun = set(self.store.names("part"))
        counts = [
            self._finished.get(shard.name) or self._finish(shard) if shard.name in done else self._tails(shard).read()
            for shard in shards
            if shard.name in done or shard.name in begun
        ]
        return Progress(
            items_total=None if index is None else len(index.items),
            items_done=int(sum(count["cleaned"] for count in counts)),
            items_quarantined=int(sum(count["quarantined"] for count in counts)),
            audio_s=round(sum(count["audio_s"] for count in counts), 3),
            shards_total=len(shards),
            shards_open=sum(shard.name not in done for shard in shards),
        )

    def records(self) -> Counter[str]:
        """How many records each worker has written, in shards that were read.  Needs `follows_workers`."""
        counts = Counter(self._records)
        for tails in self._open.values():
            counts.update(tails.records())
        return counts

    def holders(self) -> dict[str, str]:
        """The open shard in which each worker wrote last."""
        return {tails.holder: name for name, tails in self._open.items() if tails.holder is not None}

    def _tails(self, shard: Shard) -> Tails:
        tails = self._open.get(shard.name)
        if tails is None:
            tails = self._open[shard.name] = Tails(self.store, shard, self._note)
        return tails

    def _finish(self, shard: Shard) -> Row:
        try:
            record = read_done(self.store, shard.name)
            assert record is not None, "done-records are never taken back"
            refs = [PartRef.from_row(part) for part in record["parts"]]
        except (ValueError, KeyError, TypeError) as error:
            raise PermanentError(f"{self.store.location('')}: {error}; `slackwater clean verify` says more") from error
        if self.follows_workers:
            tails = self._tails(shard)
            tails.finish(refs)
            self._records.update(tails.records())
        self._open.pop(shard.name, None)
        self._finished[shard.name] = record
        return record

    def _note(self, worker: str, part: str) -> None:
        self.grown.setdefault(worker, set()).add(part)
