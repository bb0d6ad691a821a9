"""Policies to measure with: of any number of rules, most of them about others."""

from __future__ import annotations

__all__ = ["policy"]


def policy(rules: int, *, denied: str = "denied/") -> str:
    """Return a policy in TOML under which everybody may do everything, except publish and subscribe to some keys.

    So each client has to be asked about, and none of the keys of the benchmarks is refused.

    :param rules: the number of rules: one for everybody, and the others for groups and sockets of no client, about
        keys of their own.
    :param denied: the pattern of what everybody is refused.
    """
    lines = ["version = 1", 'default = "deny"', "[[rule]]", 'name = "everybody"', 'publish = [""]', 'subscribe = [""]']
    lines += [f'deny_publish = ["{denied}"]', f'deny_subscribe = ["{denied}"]']
    for number in range(rules - 1):
        lines += ["[[rule]]", f'name = "r{number}"', f'publish = ["area/{number}/", "shared/{number % 7}/*"]']
        lines += [f"users = [{200_000 + number}]", f'deny_subscribe = ["area/{number}/private/"]']
    return "\n".join(lines) + "\n"
