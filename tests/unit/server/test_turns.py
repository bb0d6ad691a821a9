"""Turns: users share the server's time, however many clients they have and whatever these ask for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sbus.server.core.turns import CONTENDED_BUDGET, CROWD, TURN_BUDGET, Turns
from tests.support.examples import examples


class Reactor:
    """A reactor that takes its turns one by one: a call for later waits for the next, as Twisted's reactors have it."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def callLater(self, delay: float, call: Callable[[], object]) -> None:
        assert delay == 0
        self.calls.append(call)

    def turn(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


class User:
    """A user with a balance."""

    def __init__(self) -> None:
        self.work_left = TURN_BUDGET

    @property
    def owner(self) -> object:
        return self


class Copies(User):
    """The balance of the copies that a user's receivers get."""

    def __init__(self, owner: User) -> None:
        super().__init__()
        self._owner = owner

    @property
    def owner(self) -> object:
        return self._owner


class Client:
    """A client with work to do: one price for each packet."""

    def __init__(self, turns: Turns, user: User, prices: list[int]) -> None:
        self.turns = turns
        self.user = user
        self.prices = deque(prices)
        self.waits = False
        self.turns_taken = 0

    def work(self) -> None:
        while self.prices:
            if self.user.work_left <= 0:
                self.waits = True
                self.turns.wait(self.user, self)
                return
            self.user.work_left -= self.prices.popleft()

    def take_turn(self) -> None:
        assert self.waits
        self.waits = False
        self.turns_taken += 1
        self.work()


def test_who_has_balance_does_not_wait():
    """As long as a user's balance lasts, nothing is scheduled."""
    reactor = Reactor()
    client = Client(Turns(reactor), User(), [1] * TURN_BUDGET)
    client.work()
    assert not client.prices
    assert not reactor.calls


def test_a_user_with_many_clients_gets_what_a_user_with_one_gets():
    """In each turn the clients of one user together do as much as the only client of another."""
    reactor = Reactor()
    turns = Turns(reactor)
    alone = Client(turns, User(), [100] * 10_000)
    user = User()
    many = [Client(turns, user, [100] * 10_000) for _ in range(100)]
    for client in (alone, *many):
        client.work()
    for _ in range(len(many)):
        reactor.turn()
    done = 10_000 - len(alone.prices)
    assert done == sum(10_000 - len(client.prices) for client in many)
    assert {client.turns_taken for client in many} == {1}


def test_a_debt_is_paid_off():
    """Work of ten turns in one piece is followed by nine turns without work."""
    reactor = Reactor()
    client = Client(Turns(reactor), User(), [10 * TURN_BUDGET, 1])
    client.work()
    for _ in range(9):
        reactor.turn()
        assert list(client.prices) == [1]
    reactor.turn()
    assert not client.prices


def test_turns_are_short_while_others_are_served():
    """If another user has sent since the last turn, the next one is short; later it grows again."""
    reactor = Reactor()
    turns = Turns(reactor)
    client = Client(turns, User(), [1] * 30 * TURN_BUDGET)
    client.work()
    done = []
    for is_shared in [True] * 3 + [False] * 20:
        if is_shared:
            turns.change(User())
        before = len(client.prices)
        reactor.turn()
        done.append(before - len(client.prices))
    assert done[:15] == [CONTENDED_BUDGET] * 15
    assert done[-3:] == [TURN_BUDGET] * 3


def test_a_crowd_takes_two():
    """The first user that sends is alone; batches of another one, or of two in turn, make a crowd."""
    turns, one, two = Turns(Reactor()), User(), User()
    turns.change(one)
    assert turns.crowd == 0
    turns.change(two)
    assert turns.crowd == CROWD
    turns.crowd = 0
    turns.change(two)
    assert turns.crowd == 0
    turns.change(one)
    assert turns.crowd == CROWD


def test_a_user_that_has_gone_makes_no_crowd():
    """A user whose clients come and go one after the other is alone each time; one that is still there is not."""
    turns, one, two = Turns(Reactor()), User(), User()
    turns.change(one)
    turns.forget_user(two)
    turns.forget_user(one)
    turns.change(two)
    assert turns.crowd == 0
    turns.change(User())
    assert turns.crowd == CROWD


def test_a_user_who_is_alone_is_topped_up_on_the_spot():
    """The new balance is the one that a turn would give, and has to pay for what is to be done."""
    turns, one = Turns(Reactor()), User()
    turns.change(one)
    one.work_left = 1
    assert not turns.top_up(one, TURN_BUDGET)
    assert one.work_left == 1
    assert turns.top_up(one, TURN_BUDGET - 1)
    assert one.work_left == TURN_BUDGET
    one.work_left = -100
    assert turns.top_up(one)
    assert one.work_left == TURN_BUDGET - 100
    one.work_left = -TURN_BUDGET
    assert not turns.top_up(one)
    assert one.work_left == -TURN_BUDGET
    turns.wait(one, Client(turns, one, []))
    one.work_left = 1
    assert turns.top_up(one, 1, in_pass=1)
    other = User()
    turns.wait(other, Client(turns, other, []))
    one.work_left = 1
    assert not turns.top_up(one, 1, in_pass=2), "another user waits"
    assert turns.top_up(one), "copies do not wait for that"


def test_nobody_is_topped_up_while_others_send():
    """A user is alone until another one sends."""
    turns, one = Turns(Reactor()), User()
    turns.change(one)
    turns.change(User())
    one.work_left = 1
    assert not turns.top_up(one)


def test_a_user_is_topped_up_once_in_a_pass():
    """However many clients it has, other sockets are looked at between two budgets."""
    turns, one = Turns(Reactor()), User()
    for number in (1, 2):
        one.work_left = 1
        assert turns.top_up(one, 1, number)
        one.work_left = 1
        assert not turns.top_up(one, 1, number)


def test_users_are_not_kept_while_nobody_waits():
    """On a bus where nobody has to wait for a turn, users that come and go are forgotten."""
    turns = Turns(Reactor())
    for _ in range(10):
        turns.change(User())
    assert len(turns._senders) == 2


def test_the_two_balances_of_a_user_share_its_turns():
    """A user that waits with both of its balances gets as many turns as one that waits with one."""
    reactor = Reactor()
    turns = Turns(reactor)
    one, two = User(), User()
    alone = Client(turns, one, [100] * 10_000)
    both = Client(turns, two, [100] * 10_000), Client(turns, Copies(two), [100] * 10_000)
    for client in (alone, *both):
        client.work()
        client.turns_taken = 0
    for _ in range(50):
        reactor.turn()
    assert alone.turns_taken == 50
    assert [client.turns_taken for client in both] == [25, 25]


class Apart:
    """A client that always waits apart from the others of its balance, and pays a price in each turn."""

    def __init__(self, turns: Turns, user: User, price: int) -> None:
        self.turns = turns
        self.user = user
        self.price = price
        self.turns_taken = 0
        turns.wait(user, self, is_apart=True)

    def take_turn(self) -> None:
        self.turns_taken += 1
        self.user.work_left -= self.price
        self.turns.wait(self.user, self, is_apart=True)


def test_who_waits_apart_has_every_other_turn_of_its_balance():
    """Beside a hundred others, and not behind them; a user's turns are not more for it."""
    reactor = Reactor()
    turns = Turns(reactor)
    one, two = User(), User()
    alone = Client(turns, one, [CONTENDED_BUDGET] * 1_000)
    many = [Client(turns, two, [CONTENDED_BUDGET] * 1_000) for _ in range(100)]
    for client in (alone, *many):
        client.work()
        client.turns_taken = 0
    apart = Apart(turns, two, CONTENDED_BUDGET)
    for _ in range(200):
        reactor.turn()
    assert alone.turns_taken == 200
    assert apart.turns_taken == 100
    assert 98 <= sum(client.turns_taken for client in many) <= 100
    assert max(client.turns_taken for client in many) == 1
    turns.forget(two, apart)
    for client in many:
        turns.forget(two, client)
    reactor.turn()
    assert apart.turns_taken == 100


def test_who_waits_apart_does_not_make_turns_short():
    """Turns are long for a user who is alone, also if its receivers wait in both lines of one balance."""
    reactor = Reactor()
    turns, user = Turns(reactor), User()
    client = Client(turns, user, [1] * 40 * TURN_BUDGET)
    client.work()
    Apart(turns, user, TURN_BUDGET)
    done = []
    for _ in range(30):
        before = len(client.prices)
        reactor.turn()
        done.append(before - len(client.prices))
    assert max(done) >= TURN_BUDGET


def test_the_two_balances_of_a_user_do_not_make_turns_short():
    """Turns are long for a user who is alone, also if it waits with both of its balances."""
    reactor = Reactor()
    turns, user = Turns(reactor), User()
    clients = [Client(turns, balance, [1] * 40 * TURN_BUDGET) for balance in (user, Copies(user))]
    for client in clients:
        client.work()
    done = []
    for _ in range(40):
        before = sum(len(client.prices) for client in clients)
        reactor.turn()
        done.append(before - sum(len(client.prices) for client in clients))
    assert done[-10:] == [TURN_BUDGET] * 10


def test_about_as_many_clients_go_on_as_the_budget_is_enough_for():
    """Clients that go on a moment after their turn, and then find the balance spent, are called in vain a few times."""

    class Slow(Client):
        done = vain = 0

        def take_turn(self) -> None:
            reactor.callLater(0, self.go_on)

        def go_on(self) -> None:
            if self.user.work_left > 0:
                Slow.done += 1
                self.user.work_left -= self.prices.pop()
            else:
                Slow.vain += 1
                self.turns.wait(self.user, self, True)
                return
            if self.prices:
                self.turns.wait(self.user, self)

    reactor = Reactor()
    turns, user = Turns(reactor), User()
    other = Client(turns, User(), [CONTENDED_BUDGET] * 1_000)  # so that turns are short
    other.work()
    for price in (CONTENDED_BUDGET // 2, 1):
        for _ in range(100):
            turns.wait(user, Slow(turns, user, [price] * 4))
        Slow.done = Slow.vain = rounds = 0
        while Slow.done < 400:
            reactor.turn()
            rounds += 1
        assert Slow.vain < 400
    assert rounds < 70  # two turns of the reactor for about 16 clients


def test_who_has_gone_is_forgotten():
    """A client that has disconnected is not called, and leaves nothing behind; forgetting it again does nothing."""
    reactor = Reactor()
    turns = Turns(reactor)
    client, other = Client(turns, User(), [2 * TURN_BUDGET, 1]), Client(turns, User(), [2 * TURN_BUDGET, 1])
    client.work()
    other.work()
    turns.forget(client.user, client)
    turns.forget(client.user, client)
    turns.forget(User(), client)
    for _ in range(3):
        reactor.turn()
    assert client.waits
    assert not other.prices
    assert not reactor.calls


def test_work_that_is_dearer_than_its_price_is_a_debt():
    """What a turn takes is measured: CPU time beyond the price is deducted, and time below it is not given back."""
    times = iter([5_000_000, 9_000_000, 9_100_000])
    turns, user = Turns(Reactor(), lambda: next(times)), User()
    before, began = user.work_left, turns.cpu()
    user.work_left -= 100
    turns.correct(user, before, began)
    assert user.work_left == before - 4_000
    turns.correct(user, user.work_left + 500, 9_000_000)
    assert user.work_left == before - 4_000


def test_work_that_is_not_the_users_to_pay_is_free():
    """The time of some work can be left out, which leaves the price that was paid."""
    turns, user = Turns(Reactor(), lambda: 4_000_000), User()
    before = user.work_left
    user.work_left -= 100
    turns.correct(user, before, 0, free=3_000)
    assert user.work_left == before - 1_000
    turns.correct(user, user.work_left + 100, 0, free=5_000)
    assert user.work_left == before - 1_000


class Bus(RuleBasedStateMachine):
    """Clients come, work and go; nobody starves, and nobody does more than a budget in a turn."""

    def __init__(self) -> None:
        super().__init__()
        self.reactor = Reactor()
        self.turns = Turns(self.reactor)
        self.users = [User() for _ in range(3)]
        self.clients: list[Client] = []

    @rule(user=st.integers(0, 2), prices=st.lists(st.integers(1, 3 * TURN_BUDGET), min_size=1, max_size=8))
    def come(self, user: int, prices: list[int]) -> None:
        client = Client(self.turns, self.users[user], prices)
        self.clients.append(client)
        client.work()

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def go(self, data) -> None:
        client = self.clients.pop(data.draw(st.integers(0, len(self.clients) - 1)))
        self.turns.forget(client.user, client)
        client.waits = False

    @rule()
    def next_turn(self) -> None:
        before = [user.work_left for user in self.users]
        self.reactor.turn()
        for user, balance in zip(self.users, before, strict=True):
            assert user.work_left <= max(balance, TURN_BUDGET)

    @invariant()
    def a_turn_is_due_if_a_client_waits(self) -> None:
        waiting = [client for client in self.clients if client.waits]
        assert all(client.prices for client in waiting)
        assert not waiting or self.reactor.calls

    def teardown(self) -> None:
        for _ in range(100_000):
            if not self.reactor.calls:
                break
            self.reactor.turn()
        assert not any(client.prices for client in self.clients)


TestBus = Bus.TestCase
TestBus.settings = settings(max_examples=examples(100), stateful_step_count=30)
