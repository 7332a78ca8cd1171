"""The pure queue and choice, by tables and by properties."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from slackwater_inference.gateway.routing import MAX_BACKOFF_S, Outcome, ReplicaSpec, Router, Ticket


def spec(name: str, slots: int) -> ReplicaSpec:
    return ReplicaSpec(name, f"http://{name}", slots)


def router(*specs: ReplicaSpec, max_queued: int = 8) -> Router:
    made = Router(max_queued)
    made.set_replicas(specs)
    return made


def admit(to: Router, count: int, now_s: float = 0.0) -> list[Ticket]:
    tickets = [to.arrive(now_s) for _ in range(count)]
    return [ticket for ticket in tickets if ticket is not None]


def places(tickets: list[Ticket]) -> list[str]:
    return [ticket.replica.uid for ticket in tickets if ticket.replica is not None]


def test_fills_the_least_loaded_replica_by_its_share_of_slots() -> None:
    to = router(spec("small", 2), spec("large", 4))
    tickets = admit(to, 6)

    to.assign(0.0)

    assert places(tickets) == ["small", "large", "large", "small", "large", "large"]


def test_gives_no_more_requests_than_slots_and_keeps_the_rest_in_order() -> None:
    to = router(spec("a", 1))
    first, second, third = admit(to, 3)

    assert to.assign(0.0) == [first]
    to.finish(first, Outcome.DONE, 1.0)

    assert to.assign(1.0) == [second]
    assert (to.in_flight, to.queued) == (1, 1)
    assert third.replica is None


def test_refuses_the_request_after_the_last_place_in_the_queue() -> None:
    to = router(spec("a", 1), max_queued=2)
    admit(to, 1)
    to.assign(0.0)

    assert [ticket is None for ticket in (to.arrive(0.0), to.arrive(0.0), to.arrive(0.0))] == [False, False, True]
    assert to.signals(0.0).rejected_total == 1
    assert to.signals(0.0).arrivals_total == 4


def test_admits_what_fits_into_free_slots_without_any_queue() -> None:
    to = router(spec("a", 1), max_queued=0)

    served = to.arrive(0.0)
    to.assign(0.0)

    assert served is not None
    assert to.arrive(0.0) is None


def test_a_request_sent_back_keeps_its_place_and_goes_elsewhere() -> None:
    to = router(spec("a", 1), spec("b", 1))
    first, second, third = admit(to, 3)
    to.assign(0.0)

    to.send_back(first)
    assert to.assign(0.0) == [third], "only a is free, and a has just sent the first one back"
    to.finish(second, Outcome.DONE, 1.0)

    assert to.assign(1.0) == [first]
    assert places([first]) == ["b"]


def test_nothing_goes_to_an_unreachable_replica_until_its_pause_is_over() -> None:
    to = router(spec("a", 1))
    (ticket,) = admit(to, 1)
    to.assign(0.0)

    to.unreachable(ticket, 0.0)
    wake_s = to.next_wake_s(0.0)

    assert wake_s is not None
    assert to.assign(wake_s - 0.01) == []
    assert to.assign(wake_s) == [ticket]


def test_pauses_double_up_to_a_bound_and_an_answer_ends_the_row() -> None:
    to = router(spec("a", 1))
    (ticket,) = admit(to, 1)
    now_s, pauses_s = 0.0, []
    for _ in range(7):
        to.assign(now_s)
        to.unreachable(ticket, now_s)
        wake_s = to.next_wake_s(now_s)
        assert wake_s is not None
        pauses_s.append(wake_s - now_s)
        now_s = wake_s

    to.assign(now_s)
    to.answered(ticket)
    to.unreachable(ticket, now_s)

    assert pauses_s == [0.25, 0.5, 1.0, 2.0, 4.0, MAX_BACKOFF_S, MAX_BACKOFF_S]
    assert to.next_wake_s(now_s) == now_s + 0.25


def test_a_replica_that_left_gets_nothing_and_is_forgotten_after_its_last_request() -> None:
    to = router(spec("old", 2))
    running, waiting, _ = admit(to, 3)
    to.assign(0.0)
    to.finish(waiting, Outcome.DONE, 1.0)

    to.set_replicas([spec("new", 1)])

    assert places(to.assign(1.0)) == ["new"]
    assert to.signals(1.0).in_flight == 2
    to.finish(running, Outcome.DONE, 2.0)
    assert [replica.uid for replica in to.replicas] == ["new"]


def test_a_replica_that_comes_back_keeps_its_count_of_running_requests() -> None:
    to = router(spec("a", 2))
    admit(to, 1)
    to.assign(0.0)

    to.set_replicas([])
    to.set_replicas([spec("a", 2)])
    admit(to, 2)

    assert len(to.assign(0.0)) == 1


def test_a_known_uid_at_another_address_is_another_replica() -> None:
    to = router(ReplicaSpec("a", "http://before", 1))
    admit(to, 2)
    to.assign(0.0)

    to.set_replicas([ReplicaSpec("a", "http://after", 1)])

    (second,) = to.assign(0.0)
    assert second.replica is not None
    assert second.replica.url == "http://after"


@pytest.mark.parametrize(
    ("slots", "queued", "service_s", "retry_after_s"),
    [
        pytest.param(0, 3, 4.0, 5, id="no replica: a guess"),
        pytest.param(4, 0, 4.0, 1, id="nobody waits: at least a second"),
        pytest.param(4, 6, 4.0, 6, id="six waiting, one slot-second each four"),
        pytest.param(4, 7, 4.0, 7, id="rounded up"),
        pytest.param(1, 60, 9.0, 60, id="never more than a minute"),
    ],
)
def test_retry_after_is_the_time_in_which_the_queue_goes_through(
    slots: int, queued: int, service_s: float, retry_after_s: int
) -> None:
    to = Router(max_queued=100, first_guess_s=service_s)
    to.set_replicas([spec("a", slots)] if slots else [])
    admit(to, slots + queued)

    to.assign(0.0)

    assert to.retry_after_s() == retry_after_s


def test_retry_after_follows_the_measured_service_time() -> None:
    to = router(spec("a", 1))
    for n in range(50):
        (ticket,) = admit(to, 1, n * 8.0)
        to.assign(n * 8.0)
        to.finish(ticket, Outcome.DONE, n * 8.0 + 8.0)

    admit(to, 3, 400.0)
    to.assign(400.0)

    assert to.retry_after_s() == 16


def test_signals_tell_the_oldest_wait_and_forget_old_first_audio() -> None:
    to = router(spec("a", 1))
    running, _ = admit(to, 1, 0.0) + admit(to, 1, 2.0)
    to.assign(2.0)
    to.first_audio(running, 3.0)

    assert to.signals(5.0).oldest_queued_s == 3.0
    assert to.signals(5.0).first_audio_p95_s == 3.0
    assert to.signals(13.5).first_audio_p95_s is None


def test_first_audio_p95_leaves_out_the_slowest_twentieth() -> None:
    to = router(spec("a", 100), max_queued=0)
    for n, ticket in enumerate(admit(to, 100), start=1):
        to.first_audio(ticket, n / 100)

    assert to.signals(1.0).first_audio_p95_s == pytest.approx(0.95)


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Whatever happens in whatever order: slots hold, order holds, nobody is lost."""

    tickets: Bundle[Ticket] = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.to = Router(max_queued=3)
        self.ended: set[Ticket] = set()

    def assign(self) -> None:
        eligible_before = [t for t in self.to._queue if not t.avoid]
        slots_before = {id(r): r.slots - r.in_flight for r in self.to.replicas}
        placed = self.to.assign(self.now_s)
        first_come = [t for t in placed if not t.avoid]
        assert first_come == eligible_before[: len(first_come)]
        for ticket in placed:
            assert ticket.replica is not None
            assert ticket.replica not in ticket.avoid
            slots_before[id(ticket.replica)] -= 1
            assert slots_before[id(ticket.replica)] >= 0

    @rule(target=tickets)
    def arrive(self) -> Ticket | MultipleResults[Ticket]:
        ticket = self.to.arrive(self.now_s)
        self.assign()
        return multiple() if ticket is None else ticket

    @rule(ticket=consumes(tickets), outcome=st.sampled_from(Outcome))
    def finish(self, ticket: Ticket, outcome: Outcome) -> None:
        self.to.finish(ticket, outcome, self.now_s)
        self.assign()

    @rule(ticket=tickets, how=st.sampled_from(["send_back", "unreachable"]))
    def come_back(self, ticket: Ticket, how: str) -> None:
        if ticket.replica is not None:
            if how == "send_back":
                self.to.send_back(ticket)
            else:
                self.to.unreachable(ticket, self.now_s)
            self.assign()

    @rule(slots=st.dictionaries(st.sampled_from("abc"), st.integers(1, 3)))
    def set_replicas(self, slots: dict[str, int]) -> None:
        self.to.set_replicas([spec(name, n) for name, n in slots.items()])
        self.assign()

    @rule(step_s=st.sampled_from([0.1, 1.0, 5.0]))
    def pass_time(self, step_s: float) -> None:
        self.now_s += step_s
        self.assign()

    @invariant()
    def every_arrival_is_in_exactly_one_place(self) -> None:
        signals = self.to.signals(self.now_s)
        refused_later = self.to.ended_total(Outcome.REFUSED)
        ended = sum(self.to.ended_total(outcome) for outcome in Outcome)
        assert (
            signals.arrivals_total
            == signals.in_flight + signals.queued + ended + signals.rejected_total - refused_later
        )

    @invariant()
    def replicas_count_what_runs_on_them(self) -> None:
        counted = sum(replica.in_flight for replica in self.to._replicas.values())
        assert counted == self.to.in_flight

    @invariant()
    def the_queue_stays_in_order_of_arrival(self) -> None:
        numbers = [ticket.number for ticket in self.to._queue]
        assert numbers == sorted(numbers)

    @invariant()
    def no_slot_is_free_while_somebody_could_take_it(self) -> None:
        for ticket in self.to._queue:
            assert self.to.pick(self.now_s, ticket.avoid) is None


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
