"""Services: clients of root and of the server's user, together one user who is not exempt.

Links, bridges, recorders and monitors say what they are before they subscribe. Packets that wait for such a client are
sent first, so that it changes its user with nothing in its name.
"""

from __future__ import annotations

from collections.abc import Callable

from sbus.server.bus.admission import Admission
from sbus.server.bus.delivery import Delivery
from sbus.server.bus.members import Members
from sbus.server.core.interfaces import Client
from sbus.server.core.users import SERVICES, User, Users

__all__ = ["Services"]


class Services:
    """Makes clients services.

    :param forget_user: called with a user that a client has left.
    """

    def __init__(
        self,
        delivery: Delivery,
        admission: Admission,
        members: Members,
        users: Users,
        forget_user: Callable[[User], None],
    ) -> None:
        self._delivery = delivery
        self._admission = admission
        self._members = members
        self._users = users
        self._forget_user = forget_user

    def enlist(self, client: Client) -> None:
        """Count a client of root or of the server's user as a service from now on, unless it holds something already.

        Links, bridges, recorders and monitors say what they are before they subscribe. Together they are one user, who
        is not exempt. A service that finds no room is disconnected.
        """
        if not client.user.is_exempt or client.pattern_memory:  # also of watches that have ended a moment ago
            return
        self._delivery.flush()  # its replies
        if self._post_enlisting(client):
            client.wait_for_mail()
        else:
            self._enlist(client)

    def _enlist_late(self, client: Client) -> None:
        if client.reason is not None or self._post_enlisting(client):  # its replies come first, too
            return
        self._enlist(client)
        client.mail_delivered()

    def _post_enlisting(self, client: Client) -> bool:
        return self._delivery.post(client, "service", lambda: self._enlist_late(client))

    def _enlist(self, client: Client) -> None:
        reason = self._admission.refusal(SERVICES, self._members.count - 1)
        if reason is not None:
            client.close(reason)
        elif not client.is_holding:
            before = client.user
            client.change_user(self._users.connect(SERVICES))
            self._members.recount(client, before)
            self._users.disconnect(before)
            self._forget_user(before)
