"""Delivery to cohorts: queue a run once for each cohort of its route.

.. rubric:: Theory of operation

For a run that waits in another user's cohort a publisher pays nothing; for a cohort of its own user it pays one price,
whatever the number of members. If cohorts have changed, each other user pays for its members' part of the new plan.
Otherwise, a user whose thousands of receivers become late one by one would make every publisher pay for a new plan each
time. If only the route is new, as for a publisher without echo, the publisher pays. It also pays for the decisions
before the run:

* If members may block this publisher, flood control decides about all their messages, and they leave their cohort. One
  step decides about some of them; the server delivers nothing of the run until none is left.
* Once half of the room is used, each run decides about some members, so that all have had a turn before the room is
  full, unless this takes more than `catch_ups` decisions in one run. An expensive decision counts as several. The turns
  of the members' user make room, too, so a publisher of another user begins with few members: only from three quarters
  on it decides about as many as it takes.

  The time of these decisions is bounded. A publisher of the members' own user pays the CPU time or the price, whichever
  is more. After the time of one turn, the server delivers only a part of its run, in proportion to the members decided
  about, and at least one message. A publisher of another user always delivers its whole run. After 4 ms its run decides
  no further, and the excess waits at the expense of the members' user.

  The decisions send to sockets only if the publisher has the same user or the route has fewer than `MANY` members, and
  for at most the time of one turn per run. Otherwise flood control treats the sockets as full.

The room is `_MOST_SHARED` messages for each cohort, and `Late.most_cohort_bytes` for all of them together. Publishers
of the members' own user have a small part of it. The room is smaller for members that keep only the newest message of
each key, because flood control takes 0.6 µs for each key: the more the keys vary, the fewer messages can wait. Each
mask also takes room, in addition to the messages (`Cohort.waiting`).
"""

from __future__ import annotations

import itertools
import math

from sbus.routing.runs import total_size
from sbus.server.bus.cohort_plans import Plan, Plans
from sbus.server.bus.cohorts import Cohort
from sbus.server.bus.late import CATCH_UP_WORK, MANY, Late, catch_ups, is_own_user
from sbus.server.core.interfaces import ICredentials, Publisher, Receiver
from sbus.server.core.prices import POSTPONED, SHARED
from sbus.server.core.turns import CONTENDED_BUDGET, TURN_BUDGET

__all__ = ["CohortDelivery"]

_COHORT_WORTH_DECIDING = 2_048
"""The members of a cohort want turns when this number of messages waits for it."""
_MOST_SHARED = 262_144
"""Messages that wait undecided for one cohort: twice what others publish while 4,000 members have their turns."""
_LEAST_REPLACED = 2_048
"""The same for receivers that keep only the newest message of each key, if each message has a key of its own."""
_MOST_OWN = 8_192
"""Messages of this room that publishers of the members' own user may take."""
_OWN_COHORT_PART = 4
"""The part (one over it) of the bytes that these publishers may take. Other users pay for decisions from half on: if
these could take half, one message of another user could pay for deciding about thousands of theirs."""
_MEASURED = 4
"""Members about which a run decides between two looks at the clock, unless it also sends to them."""
_SEARCHED = 10
"""Members among which those with a mask are searched for one unit of work."""
_MOST_ANSWERS = 16
"""Publishers for which a cohort knows whether its members may block them."""


class CohortDelivery:
    """Delivers runs to cohorts.

    :param late: the late receivers.
    :param credentials: decides whether a receiver may block a publisher.
    """

    __slots__ = ("_cohorts", "_credentials", "_late", "_plans")

    def __init__(self, late: Late, credentials: ICredentials) -> None:
        self._late = late
        self._credentials = credentials
        self._cohorts = late.cohorts
        self._plans = Plans(late.cohorts)

    def prepare(
        self, packets: list[bytes], receivers: tuple[Receiver, ...], publisher: Publisher | None
    ) -> tuple[Plan | None, int, int]:
        """Decide about members of cohorts that cannot wait for a run.

        :returns: the plan, for the receivers that can wait; the number of packets, from the front, that can be
            delivered now; and the price, for the publisher. The plan is None if there is more to decide than one step
            may take: then the publisher goes on when it has paid for this one.
        """
        if not self._cohorts.of:
            return Plan(receivers, (), 0), len(packets), 0
        count, work = self._serve_overdue(self._plans.find(receivers), packets, publisher)
        left = catch_ups(len(receivers))
        plan = self._plans.find(receivers)
        while blocking := [
            (each, mask) for each, mask, _ in plan.cohorts if each.can_block and self._may_block(each, publisher)
        ]:
            for cohort, mask in blocking:
                cohort.want_turns()  # so that one digest serves all members
                work += 0 if mask is None else len(cohort.members) // _SEARCHED
                for receiver in cohort.members_in(mask):
                    if left <= 0:
                        return None, 0, work
                    price = self._take_out(cohort, receiver)
                    work += price  # not by the clock: those taken out could join again before its next turn
                    left -= 1 + price // CATCH_UP_WORK
            plan = self._plans.find(receivers)
        return plan, count, work

    def _take_out(self, cohort: Cohort, receiver: Receiver) -> int:
        """Decide about all that waits for a member of a cohort, which leaves the cohort; return the price."""
        price = self._late.serve(receiver, are_many=False)
        if receiver in cohort.members and receiver.queue is not None:
            price += self._late.catch_up(receiver, receiver.queue)  # what has come since it was due, usually nothing
        return price

    def add(self, plan: Plan, packets: list[bytes], publisher: Publisher | None) -> tuple[int, int]:
        """Have a run wait for the cohorts of a plan.

        :returns: the price, for the publisher; and the work that it does not pay for (`Delivery.unpaid`).
        """
        size, unpaid = total_size(packets), 0
        effort, self._plans.effort = self._plans.effort, 0
        work, self._plans.searches = effort + self._plans.searches, 0
        for cohort, mask, members in plan.cohorts:
            if not cohort.waiting():
                self._late.set_timer()
            self._cohorts.add(cohort, packets, size, mask)
            if cohort.waiting() >= _COHORT_WORTH_DECIDING:
                self._late.call(cohort)
            if is_own_user(publisher, cohort.user):
                work += SHARED
            else:
                if effort:
                    part = effort * members // (plan.members + len(plan.others))
                    cohort.user.copies.work_left -= part
                    work -= part
                    unpaid += part
                unpaid += POSTPONED
        return work, unpaid

    def note_gone(self) -> None:
        """Note that a receiver has gone."""
        self._plans.note_gone()

    def _serve_overdue(self, plan: Plan, packets: list[bytes], publisher: Publisher | None) -> tuple[int, int]:
        """Decide about some members for which much waits.

        :returns: the number of packets, from the front, for which this has made room; and the price.
        """
        count, size = len(packets), total_size(packets)
        overdue = [
            (cohort, members)
            for cohort, _, _ in plan.cohorts
            if (members := self._overdue(cohort, count, size, is_own_user(publisher, cohort.user)))
        ]
        if not overdue:
            return count, 0
        # The largest first: in plan order, every run would serve the same cohorts.
        overdue.sort(key=lambda each: each[0].blocks.size, reverse=True)
        work, left, are_few = 0, catch_ups(plan.members), plan.members < MANY
        late = self._late
        began = now = late.cpu()
        end = began + (CONTENDED_BUDGET if late.is_contended else TURN_BUDGET) * 1_000
        for cohort, wanted in overdue:
            is_own = is_own_user(publisher, cohort.user)
            sends, wanted = are_few or is_own, min(wanted, left)
            chosen, decided = list(itertools.islice(cohort.members, wanted)), 0
            while decided < len(chosen):
                if now >= end:
                    sends = False
                    if is_own:
                        return max(1, count * decided // wanted), work
                    if now >= began + TURN_BUDGET * 1_000:
                        return count, work
                paid, until = 0, decided + (1 if sends else _MEASURED)
                for receiver in chosen[decided:until]:
                    price = late.serve(receiver, are_many=True, sends=sends)
                    paid += price
                    decided += 1
                    left -= 1 + price // CATCH_UP_WORK
                    if left <= 0 or price >= CATCH_UP_WORK:
                        break
                before, now = now, late.cpu()
                work += max(paid, (now - before) // 1_000) if is_own else paid
                if left <= 0:
                    return count, work
        return count, work

    def _overdue(self, cohort: Cohort, messages: int, size: int, is_own: bool) -> int:
        """Return the number of members to decide about before messages are added to a cohort.

        :param size: the bytes of the messages.
        :param is_own: the publisher and the cohort are of one user.
        """
        most, most_bytes = _MOST_SHARED, self._late.most_cohort_bytes
        if cohort.replaces:
            most = int(max(_LEAST_REPLACED, min(_MOST_SHARED, _LEAST_REPLACED / cohort.variety)))
        if is_own:
            most, most_bytes = min(_MOST_OWN, most // _OWN_COHORT_PART), most_bytes // _OWN_COHORT_PART
        waiting = cohort.waiting()
        left = min(1 - waiting / most, 1 - self._cohorts.bytes / most_bytes)
        if left > 0.5 or not waiting:
            return 0
        cohort.want_turns()
        part = max(messages / most, size / most_bytes) / left if left > 0 else 1
        if not is_own and left > 0.25 and part < 1:
            return int(part * (2 - 4 * left) * len(cohort.members))
        return math.ceil(min(part, 1) * len(cohort.members))

    def _may_block(self, cohort: Cohort, publisher: Publisher | None) -> bool:
        """Return whether a member of a cohort may block a publisher."""
        if publisher is None:
            return False
        may_block, answers = self._credentials.mayBlock, cohort.blockable
        if cohort.unasked:
            for each, answer in answers.items():
                answers[each] = answer or any(may_block(receiver.peer, each.peer) for receiver in cohort.unasked)
            cohort.unasked.clear()
        if publisher not in answers:
            if len(answers) >= _MOST_ANSWERS:
                answers.clear()
            answers[publisher] = any(may_block(receiver.peer, publisher.peer) for receiver in cohort.members)
        return answers[publisher]
