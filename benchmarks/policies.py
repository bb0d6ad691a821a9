"""Policies to measure with: of any number of rules, most of them about others."""

from __future__ import annotations

import json

__all__ = ["policy"]


def policy(rules: int, private: int = 0) -> str:
    """Return a policy in TOML under which everybody may do everything, except publish and subscribe to some keys.

    So each client has to be asked about. Nobody may use keys below ``denied/``; the benchmarks of messages use none.

    :param rules: the number of rules: one for everybody, and the others for users without a client, about keys of
        their own.
    :param private: the number of areas that have a private part, to which nobody may subscribe.
    """
    denied = ["denied/", *(f"area/{number}/private/" for number in range(private))]
    lines = ["version = 1", 'default = "deny"', "[[rule]]", 'name = "everybody"', 'publish = [""]', 'subscribe = [""]']
    lines += ['deny_publish = ["denied/"]', f"deny_subscribe = {json.dumps(denied)}"]
    for number in range(rules - 1):
        lines += ["[[rule]]", f'name = "r{number}"', f'publish = ["area/{number}/", "shared/{number % 7}/*"]']
        lines += [f"users = [{200_000 + number}]", f'deny_subscribe = ["area/{number}/private/"]']
    return "\n".join(lines) + "\n"
