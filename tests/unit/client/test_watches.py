"""Watches, without a server; `tests.integration.clients.test_extensions` has them with one."""

from __future__ import annotations

import pytest

from sbus.client.watches import Watch, Watches


def test_a_key_whose_end_was_interrupted() -> None:
    """If a signal handler raises as the last watch of a key ends, the next connection does not ask for the key."""

    class Interrupting(dict[bytes, list[Watch]]):
        def __delitem__(self, key: bytes) -> None:
            raise KeyboardInterrupt

    watches, watch = Watches(), Watch(b"k")
    watches._watches = Interrupting()
    watches.add(watch)
    with pytest.raises(KeyboardInterrupt):
        watches.remove(watch)
    watches.disconnected()
    assert watches.keys() == ()
    assert watches.add(watch)
