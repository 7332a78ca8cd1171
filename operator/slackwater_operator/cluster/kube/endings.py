"""How pods ended: what a victim left behind, and what its owner learns from it.

Owns the judgement of an end, by one rule: work is lost when it was durable by a receipt and the keeper of its ledger
does not find that there.  Without a receipt nothing was durable, so nothing is lost; where nobody could look, it is not
known, and is said in words of its own.  What a worker did after its newest receipt is done again by another one, and
is counted in GPU-seconds alone.  Verifying goes on in the background; GPUs are given on long before.
"""

import asyncio
import logging
from dataclasses import dataclass, field

from slackwater_operator.cluster.kube.owners import STEADY_S, Owner, smoothed
from slackwater_operator.cluster.kube.pods import BAD_INPUT, CHECKPOINTED, KILLED, TERMINATED, Ended, Pod
from slackwater_operator.cluster.kube.state import State
from slackwater_operator.cluster.kube.takes import Take, Victim
from slackwater_operator.kube.types import Object
from slackwater_operator.resources import names
from slackwater_operator.resources.cleaning import CleaningJob

logger = logging.getLogger(__name__)

VERIFY_FOR_S = 120.0  # a keeper that does not answer for so long is given up on; one of a lost node is back by then
VERIFY_EVERY_S = 1.0
KEEP_S = 3600.0  # the newest pod of an owner that failed by itself stays for so long, for people to read its logs
Task = asyncio.Task[bool | None]
CLEAN = (0, CHECKPOINTED)  # exit codes of a worker that left with all its work durable
HELD = "it waits for a person after a preemption (restartPolicy Hold): set suspend and take it back"
STOPPED = "it ended with a preemption (restartPolicy Stop)"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a victim.  verified: all that was durable is in the ledger; None = nobody could be asked."""

    outcome: str
    verified: bool | None


def first_verdict(ended: Ended | None, *, had_begun: bool) -> Verdict | None:
    """What is clear from the end alone; None if the receipt has to be looked for in the ledger."""
    if ended is None:
        return Verdict("Unverified", None) if had_begun else Verdict("Checkpointed", True)
    if ended.receipt is not None:
        return None
    return Verdict("Timeout" if ended.code == KILLED and ended.has_begun else "Checkpointed", True)


def last_verdict(ended: Ended, holds: bool | None) -> Verdict:
    """With the keeper's word on the receipt."""
    if holds is False:
        return Verdict("Lost", False)
    if ended.code == KILLED:
        return Verdict("Timeout", holds)
    return Verdict("Checkpointed" if holds else "Unverified", holds)


@dataclass(slots=True)
class Question:
    """A receipt that the keeper has to confirm.   owner: of the job as it was when the victim ended."""

    take: Take
    victim: Victim
    owner: Owner
    ended: Ended
    receipt: Object
    since_s: float
    asked_s: float
    task: Task | None = None


@dataclass(slots=True)
class Endings:
    """Takes in ends of pods; keeps the verifications that are under way."""

    state: State
    _seen: dict[str, str] = field(default_factory=dict)  # Pod.uid -> k8s uid, of ended pods whose objects are there
    _questions: list[Question] = field(default_factory=list)
    _kept: dict[tuple[str, str], Pod] = field(default_factory=dict)  # by kind and owner

    def take_in(self, now_s: float) -> list[Pod]:
        """Book every pod that ended since the last call; returns those whose objects are still to be deleted."""
        state = self.state
        for pod in state.index.take_gone():
            if self._seen.pop(pod.uid, "") != pod.k8s_uid:
                self._ended(pod, now_s)
            state.forget(pod)
        over = list(state.index.over.values())
        for pod in over:
            if self._seen.get(pod.uid) != pod.k8s_uid:
                self._seen[pod.uid] = pod.k8s_uid
                if pod.is_booked:
                    self._keep(pod)
                else:
                    self._ended(pod, now_s)
        for take in state.takes.values():
            for victim in take.living:
                found = state.index.ours.get(victim.pod)
                if not take.in_doubt and (found is None or found.k8s_uid != victim.k8s_uid):
                    self._freed(take, victim, None, now_s)  # it ended while nobody looked
        self._kept = {key: pod for key, pod in self._kept.items() if self._stays(pod, now_s)}
        kept = {pod.k8s_uid for pod in self._kept.values()}
        return [pod for pod in over if pod.deleting_s is None and pod.k8s_uid not in kept]

    def unmarked(self) -> list[Pod]:
        """Pods that stay, and of which another leader would not know that their end is taken in."""
        there = [self.state.index.over[pod.uid] for pod in self._kept.values()]
        return [pod for pod in there if not pod.is_booked and pod.deleting_s is None]

    async def close(self) -> None:
        """End the verifications that are under way."""
        tasks = [question.task for question in self._questions if question.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def verify(self, now_s: float) -> None:
        """Ask the keepers, take in what they said, and ask again those that could not say; never waits."""
        for question in list(self._questions):
            # The keeper of another job under the same name reads another ledger.
            is_former = self.state.owner(names.POD_CLEANING, question.victim.job) is not question.owner
            task, is_late = question.task, is_former or now_s - question.since_s > VERIFY_FOR_S
            holds = None
            if task is not None and task.done():
                question.task = None
                unknown = is_former or task.cancelled() or task.exception() is not None
                holds = None if unknown else task.result()
            if holds is not None or is_late:
                self._questions.remove(question)
                if task is not None:
                    task.cancel()
                if holds is None:
                    logger.warning("%s: no keeper could say whether its receipt holds", question.victim.pod)
                verdict = last_verdict(question.ended, holds)
                self._settle(question.take, question.victim, question.owner, question.ended, verdict)
            elif question.task is None and now_s - question.asked_s >= VERIFY_EVERY_S:
                question.asked_s = now_s
                asking = self.state.progress.verify(question.victim.job, question.receipt)
                question.task = asyncio.ensure_future(asking)
                question.task.add_done_callback(lambda _task: self.state.poke())

    def _ended(self, pod: Pod, now_s: float) -> None:
        state = self.state
        victim, was_asked = state.victim(pod), state.leaving_since(pod) is not None or pod.draining_s is not None
        if pod.kind == names.POD_CLEANING:
            state.departed.append((pod.uid, self._committed(pod)))
            owner = state.owner_of(pod)
            owner.gpu_seconds += state.gpu_seconds(pod, now_s)
        self._learn(pod, now_s, was_asked=was_asked)
        if victim is not None:
            self._freed(state.victims[pod.uid], victim, pod, now_s)

    def _committed(self, pod: Pod) -> float:
        """A worker that left cleanly has committed all that it did."""
        known = self.state.committed.get(pod.uid, 0.0)
        ended = pod.ended
        if ended and ended.code in CLEAN and ended.started_s and ended.finished_s:
            gpus = pod.gpus(self.state.catalogue.resource_of(pod.flavor))
            return max(known, (ended.finished_s - ended.started_s) * gpus)
        return known

    # --- owners -----------------------------------------------------------------------------------

    def _learn(self, pod: Pod, now_s: float, *, was_asked: bool) -> None:
        """What the next start of this owner should know."""
        owner, ended = self.state.owner_of(pod), pod.ended
        if pod.refused:
            logger.warning("the kubelet of %s did not take %s: %s", pod.node, pod.uid, pod.refused)
            owner.avoid(pod.node, now_s)
            return
        if ended is None:
            return
        is_worker = pod.kind == names.POD_CLEANING
        if ended.started_s is not None:
            owner.started_in(max(0.0, ended.started_s - pod.created_s))
        if ended.code == BAD_INPUT and not was_asked:
            self._keep(pod)
            owner.broken = _told(ended) or "it ended with 2, bad configuration, without a word"
            logger.error("not starting %s again: %s", pod.owner, owner.broken)
        elif was_asked or (is_worker and ended.code in (CHECKPOINTED, TERMINATED)):
            if ended.code in (*CLEAN, TERMINATED):
                owner.succeeded()
        elif is_worker and ended.code == 0:
            if _was_steady(ended):
                owner.rests = 0
            owner.found_nothing(now_s)
            job = self.state.catalogue.jobs.get(pod.owner)
            owner.is_done = owner.is_done or job is None or not _has_keeper(job)
        else:
            self._keep(pod)
            if _was_steady(ended):
                owner.failures = 0
            words = f"{pod.name} ended with {ended.code}: {_told(ended)}".rstrip(": ")
            delay_s = owner.failed(now_s, words)
            logger.error("failed uid=%s code=%d backoff_s=%.0f %s", pod.uid, ended.code, delay_s, words)

    def _keep(self, pod: Pod) -> None:
        """The newest of its owner stays."""
        key = pod.kind, pod.owner
        if key not in self._kept or self._kept[key].created_s <= pod.created_s:
            self._kept[key] = pod

    def _stays(self, pod: Pod, now_s: float) -> bool:
        there = self.state.index.over.get(pod.uid)
        ended_s = pod.created_s if pod.ended is None else pod.ended.finished_s or pod.created_s
        return there is not None and there.k8s_uid == pod.k8s_uid and now_s - self.state.clock.moment(ended_s) < KEEP_S

    # --- victims ----------------------------------------------------------------------------------

    def _freed(self, take: Take, victim: Victim, pod: Pod | None, now_s: float) -> None:
        """A victim's GPUs were seen free."""
        state = self.state
        victim.freed_s = now_s
        if state.victims.get(victim.pod) is take:
            del state.victims[victim.pod]
        state.reclaim_s[take.policy_flavor] = smoothed(state.reclaim_s.get(take.policy_flavor), now_s - take.decided_s)
        job = state.catalogue.jobs.get(victim.job)
        owner = state.owner(names.POD_CLEANING, victim.job) if pod is None else state.owner_of(pod)
        _hold(owner, job)
        if victim.outcome:
            return  # another leader wrote it down
        ended = pod.ended if pod is not None else None
        verdict = first_verdict(ended, had_begun=pod is None or pod.running_s is not None or ended is not None)
        receipt = ended.receipt if ended is not None else None
        if receipt is not None:
            victim.durable_unit = receipt["items"] if isinstance(receipt.get("items"), int) else None
            victim.digest = str(receipt["sha256"])
        is_former = pod is not None and state.is_former(pod)
        if verdict is None and (job is None or is_former or job.spec.checkpoint.verify == "None"):
            assert ended is not None
            verdict = last_verdict(ended, None)
        if verdict is not None:
            self._settle(take, victim, owner, ended, verdict)
            return
        assert ended is not None
        assert receipt is not None, "an end without a receipt is judged at once"
        self._questions.append(Question(take, victim, owner, ended, receipt, now_s, now_s - VERIFY_EVERY_S))

    def _settle(self, take: Take, victim: Victim, owner: Owner, ended: Ended | None, verdict: Verdict) -> None:
        victim.outcome, victim.verified = verdict.outcome, verdict.verified
        owner.lost += verdict.verified is False
        owner.unverified += verdict.verified is None
        if verdict.verified and ended is not None and ended.receipt is not None and ended.finished_s is not None:
            owner.durable_wall_s = max(owner.durable_wall_s or 0.0, ended.finished_s)
        if verdict.outcome != "Checkpointed" or (ended is not None and ended.has_begun and ended.code not in CLEAN):
            since_s = victim.durable_s
            if since_s is None and ended is not None and ended.started_s is not None:
                since_s = self.state.clock.moment(ended.started_s)
            asked_s = victim.asked_s if victim.asked_s is not None else take.decided_s
            victim.lost_s = (
                max(0.0, asked_s - since_s) * victim.gpus if since_s is not None else victim.estimated_lost_s
            )
        level = logging.INFO if verdict.outcome == "Checkpointed" else logging.WARNING
        logger.log(
            level,
            "freed uid=%s outcome=%s verified=%s lost_s=%.1f",
            victim.pod,
            *(verdict.outcome, verdict.verified),
            victim.lost_s,
        )


def _hold(owner: Owner, job: CleaningJob | None) -> None:
    """A preemption is the end of a job whose restart policy says so."""
    if job is None or job.spec.restart_policy == "Requeue":
        return
    owner.is_stopped = job.spec.restart_policy == "Stop"
    owner.broken = owner.broken or (STOPPED if owner.is_stopped else HELD)


def _was_steady(ended: Ended) -> bool:
    return bool(ended.started_s and ended.finished_s and ended.finished_s - ended.started_s > STEADY_S)


def _has_keeper(job: CleaningJob) -> bool:
    return job.spec.ledger is not None or job.spec.keeper.url is not None


def _told(ended: Ended) -> str:
    """The container's last line; a receipt is for the keeper, and told in words."""
    if ended.receipt is not None:
        items = ended.receipt.get("items")
        how_many = f"its first {items} items are" if isinstance(items, int) else "what it said before is"
        return f"it left no word on why; {how_many} durable"
    lines = [line.strip() for line in ended.words.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""
