"""Convert policies of D-Bus (``<busconfig>``, as in ``/etc/dbus-1/system.d``) into a policy.

The key of a call is ``NAME/call/INTERFACE/MEMBER``, that of a signal ``NAME/signal/INTERFACE/MEMBER``, with slashes for
the dots of NAME. So a program that may call a service cannot publish the service's signals.

D-Bus takes the last rule that matches; here a deny always wins. So a deny is kept only if an allow stands before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from sbus.errors import UsageError
from sbus.policy.draft import Draft, is_possible, share_a_key

__all__ = ["convert"]

_HEADING = (
    "A call to NAME has the key NAME/call/INTERFACE/MEMBER, a signal NAME/signal/INTERFACE/MEMBER, with '/' for '.'",
    "in NAME. Replies go to inboxes, which no rule has to allow. Convert files that D-Bus reads together in one go,",
    "the system's own first: it lets everybody receive signals.",
)
_SAID = {"own", "own_prefix", "send_destination", "send_destination_prefix", "send_interface", "send_member"}
_SAID |= {"receive_sender", "receive_interface", "receive_member", "send_type=method_call", "receive_type=signal"}
_ORDER = {"default": 0, "group": 1, "user": 2, "at_console": 3, "mandatory": 4}
_WINS = "it also takes what a later rule allows, as a deny always wins: narrow one of them"
_LEVELS = 8
"""The elements of the longest name that is converted; real ones have up to five."""


@dataclass
class _Rule:
    """An ``<allow>`` or ``<deny>``, with its patterns by verb; one about connecting is not part of the order."""

    source: str
    is_allow: bool
    users: list[str]
    groups: list[str]
    publish: list[str]
    subscribe: list[str]
    why: str = ""
    is_connecting: bool = False


def convert(files: Sequence[tuple[str, str]]) -> str:
    """Return the policy.

    A rule that has no equivalent here is left out if it allows, and widened if it denies; a comment says so.

    :param files: the path and the text of each file, in the order in which D-Bus reads them.
    :raises UsageError: if one is not XML, or declares entities.
    """
    draft = Draft([path for path, _ in files], _HEADING)
    policies = [policy for path, text in files for policy in _parse(path, text).iter("policy")]
    policies.sort(key=lambda policy: _ORDER[_kind(policy)])
    rules = [_rule(policy, each) for policy in policies for each in policy if each.tag in ("allow", "deny")]
    for at, rule in enumerate(rules):
        fields = {"publish": rule.publish, "subscribe": rule.subscribe}
        if not rule.is_allow and any(fields.values()):
            if not rule.is_connecting and not any(_meet(rule, other) for other in rules[:at]):
                draft.comment(rule.source, 'not needed: default = "deny" refuses it')
                continue
            if any(_meet(rule, other) for other in rules[at + 1 :]):
                rule.why = "; ".join(filter(None, (rule.why, _WINS)))
            fields = {f"deny_{verb}": patterns for verb, patterns in fields.items()}
        if any(fields.values()):
            draft.rule(rule.source, rule.why, users=rule.users, groups=rule.groups, **fields)
        else:
            draft.comment(rule.source, rule.why or "not converted: it names nothing that has a key here")
    return str(draft)


def _parse(path: str, text: str) -> ElementTree.Element:
    try:
        if "<!ENTITY" in text:
            raise ValueError("it declares entities, which could grow without end")
        return ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as e:
        raise UsageError(f"{path}: not XML that can be converted: {e}: correct the file") from None


def _kind(policy: ElementTree.Element) -> str:
    kinds = [kind for kind in ("user", "group", "at_console") if kind in policy.attrib]
    return kinds[0] if kinds else "mandatory" if policy.get("context") == "mandatory" else "default"


def _meet(deny: _Rule, allow: _Rule) -> bool:
    """Return whether an allow gives somebody a right that the deny takes."""
    if not allow.is_allow or (deny.users and allow.users and not set(deny.users) & set(allow.users)):
        return False
    return share_a_key(deny.publish, allow.publish) or share_a_key(deny.subscribe, allow.subscribe)


def _rule(policy: ElementTree.Element, each: ElementTree.Element) -> _Rule:
    kind, is_allow, words = _kind(policy), each.tag == "allow", dict(each.attrib)
    where = f"{kind}={policy.get(kind)}" if kind in policy.attrib else f"context={kind}"
    source = f"<policy {where}> <{each.tag} {' '.join(f'{name}={value}' for name, value in words.items())}>"
    users, groups = ([value] if kind == of and (value := policy.get(of)) else [] for of in ("user", "group"))
    rule = _Rule(source, is_allow, users, groups, [], [])
    if kind == "at_console":
        rule.why = "nothing here knows who is at the console: a deny is for everybody, an allow is not converted"
        if is_allow:
            return rule
    if "user" in words or "group" in words:
        if is_allow:
            rule.why = "not converted: --mode, --group and --allow-user say who may connect"
            return rule
        rule.users, rule.groups = ([words[of]] if words.get(of, "*") != "*" else [] for of in ("user", "group"))
        rule.publish, rule.subscribe, rule.is_connecting = [""], [""], True
        return rule
    if {words.get("send_type"), words.get("receive_type")} & {"method_return", "error"}:
        rule.why = "not converted: replies go to inboxes, which the kernel's word protects"
        return rule
    unsaid = [name for name, value in words.items() if value != "*" and not _SAID & {name, f"{name}={value}"}]
    if unsaid and is_allow:
        rule.why = f"not converted: {', '.join(unsaid)} cannot be said of a key, and the rule would allow more without"
        return rule
    if unsaid:
        rule.why = f"it denies more than before: {', '.join(unsaid)} cannot be said of a key"
    _fill(rule, words)
    rule.why = rule.why if rule.publish or rule.subscribe else ""
    return rule


def _fill(rule: _Rule, words: dict[str, str]) -> None:
    """Set the patterns of a rule."""
    if (name := words.get("own", words.get("own_prefix"))) is not None:
        rule.subscribe += _patterns(name, "own_prefix" in words, "call", "*", "*")
        rule.publish += _patterns(name, "own_prefix" in words, "signal", "*", "*")
    for side, of, kind, found in (
        ("send", "destination", "call", rule.publish),
        ("receive", "sender", "signal", rule.subscribe),
    ):
        if any(name.startswith(f"{side}_") for name in words):
            prefix = words.get(f"{side}_{of}_prefix")
            parts = (words.get(f"{side}_interface", "*"), words.get(f"{side}_member", "*"))
            found += _patterns(prefix or words.get(f"{side}_{of}", "*"), prefix is not None, kind, *parts)


def _patterns(name: str, is_prefix: bool, *rest: str) -> list[str]:
    """Return the patterns of a name, of all names below it, or of all (``*``)."""
    base = [] if name == "*" else name.split(".")
    if len(base) > _LEVELS:
        return []
    more = range(_LEVELS - len(base) + 1) if is_prefix or not base else range(1)
    found = ["/".join([*base, *("*" * levels), *rest]) for levels in more if base or levels]
    return [pattern for pattern in found if is_possible(pattern)]
