"""Access rules of D-Bus and mosquitto as policies: what they become, and that nothing becomes wider."""

from __future__ import annotations

import pwd
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from sbus.cli.policy.convert import convert
from sbus.errors import UsageError
from sbus.policy import Identity, Policy, convert_dbus, convert_mosquitto, load
from sbus.policy.review import review
from tests.support import ROOT

USERS = ("root", "daemon", "bin")


def loaded(tmp_path: Path, text: str) -> Policy:
    file = tmp_path / "policy.toml"
    file.write_text(text)
    return load(str(file))


def may(policy: Policy, user: str, verb: str, key: str) -> bool:
    """Return whether a user may publish or subscribe to a key."""
    who = Identity(pwd.getpwnam(user).pw_uid, 99, frozenset(), "main", True)
    rights = policy.rights_of(who)
    if verb == "publish":
        return rights.publication(policy.zone(key.encode())).is_allowed
    return rights.subscription(key.encode()).is_allowed


# --- mosquitto ----------------------------------------------------------------------------------------------------


def mosquitto(*lines: str) -> str:
    return convert_mosquitto.convert([("acl", "\n".join(lines))])


@pytest.mark.parametrize(
    ("topic", "patterns"),
    [
        ("a/b", '["a/b"]'),
        ("a/+/b", '["a/*/b"]'),
        ("a/#", '["a/", "a"]'),
        ("#", '[""]'),
        ("with space/x", '["with space/x"]'),
        ('quote"\\', '["quote\\"\\\\"]'),
    ],
)
def test_topics(topic, patterns):
    """A topic filter becomes patterns that match the same names."""
    assert f"\nsubscribe = {patterns}\n" in mosquitto("user root", f"topic read {topic}")


@pytest.mark.parametrize("topic", ["a*/b", "a/", "a/#/b", "a+", "!/cred/0/0/1", "client/%c"])
def test_topics_that_have_no_pattern(topic):
    """A topic filter that a pattern would widen, or that matches nothing, is left out, with the reason."""
    converted = mosquitto("user root", f"{'pattern' if '%' in topic else 'topic'} read {topic}")
    assert "[[rule]]" not in converted
    assert "not converted" in converted


def test_access(tmp_path):
    """Each access is its fields; without one, both; a deny wins, wherever it stands."""
    policy = loaded(
        tmp_path,
        mosquitto(
            "user root",
            "topic deny a/x",
            "topic read a/#",
            "topic write w",
            "topic both",
            "user daemon",
            "topic read d",
        ),
    )
    assert [may(policy, "root", "subscribe", key) for key in ("a/b", "a", "a/x", "a/")] == [True, True, False, False]
    assert not may(policy, "root", "publish", "a/b")
    assert may(policy, "root", "publish", "w")
    assert not may(policy, "root", "subscribe", "w")
    assert may(policy, "root", "publish", "both")
    assert may(policy, "root", "subscribe", "both")
    assert may(policy, "daemon", "subscribe", "d")
    assert not may(policy, "root", "subscribe", "d")
    assert not may(policy, "bin", "publish", "both")


def test_rules_for_nobody():
    """Rules above the first user are for clients without a name, of which there are none here."""
    assert "[[rule]]" not in mosquitto("topic readwrite #")


def test_patterns_of_users(tmp_path):
    """A pattern with %u becomes a rule for each user of the file; one that denies is for all names."""
    policy = loaded(
        tmp_path, mosquitto("user root", "user daemon", "pattern write home/%u/#", "pattern deny home/%u/x")
    )
    assert may(policy, "root", "publish", "home/root/a")
    assert not may(policy, "root", "publish", "home/daemon/a")
    assert not may(policy, "bin", "publish", "home/bin/a")
    assert not may(policy, "root", "publish", "home/root/x")


LEVELS = st.sampled_from(["a", "b", "+", "%u", "*", ""])
TOPICS = st.builds(
    lambda levels, end: "/".join([*levels, *end]),
    st.lists(LEVELS, min_size=1, max_size=3),
    st.sampled_from([[], ["#"]]),
)
LINES = st.lists(
    st.one_of(
        st.builds("user {}".format, st.sampled_from(USERS)),
        st.builds("topic {} {}".format, st.sampled_from(["read", "write", "readwrite", "deny"]), TOPICS),
        st.builds("pattern {} {}".format, st.sampled_from(["read", "write", "readwrite", "deny"]), TOPICS),
    ),
    max_size=6,
)


def mosquitto_allows(lines: list[str], user: str, access: str, topic: str) -> bool:
    """What mosquitto does: a deny that matches, else an allow that matches, else no."""
    section, is_allowed = "", False
    for line in lines:
        kind, word, *rest = line.split(" ", 2)
        if kind == "user":
            section = word
            continue
        (wanted,) = rest
        if kind == "topic" and section != user:
            continue
        if kind == "pattern":
            wanted = wanted.replace("%u", user)
        expression = re.escape(wanted).replace(r"\+", "[^/]*")
        expression = re.sub("(^|/)\\\\#$", lambda match: "(/.*)?" if match[1] else ".*", expression)
        if re.fullmatch(expression, topic):
            if word == "deny":
                return False
            is_allowed |= word in (access, "readwrite")
    return is_allowed


@given(LINES, st.sampled_from(USERS), st.lists(st.sampled_from(["a", "b", "root", "c", "*"]), min_size=1, max_size=4))
def test_nothing_of_mosquitto_is_wider(tmp_path_factory, lines, user, levels):
    """What the policy allows, mosquitto allows, too."""
    text = convert_mosquitto.convert([("acl", "\n".join(lines))])
    policy = loaded(tmp_path_factory.getbasetemp(), text)
    topic = "/".join(levels)
    if may(policy, user, "publish", topic):
        assert mosquitto_allows(lines, user, "write", topic), text
    if "*" not in topic and may(policy, user, "subscribe", topic):
        assert mosquitto_allows(lines, user, "read", topic), text


# --- D-Bus ---------------------------------------------------------------------------------------------------------


def dbus(*policies: str) -> str:
    return convert_dbus.convert([("org.example.conf", f"<busconfig>{''.join(policies)}</busconfig>")])


def test_a_service(tmp_path):
    """An owner answers calls and sends signals; others call it, and get its signals."""
    policy = loaded(
        tmp_path,
        dbus(
            '<policy context="default"><deny own="org.x.S"/><allow send_destination="org.x.S"/>'
            '<allow receive_sender="org.x.S"/></policy>',
            '<policy user="daemon"><allow own="org.x.S"/></policy>',
        ),
    )
    call, signal = "org/x/S/call/org.x.I/Get", "org/x/S/signal/org.x.I/Changed"
    assert may(policy, "daemon", "subscribe", "org/x/S/call/*/*")
    assert may(policy, "daemon", "publish", signal)
    assert may(policy, "root", "publish", call)
    assert may(policy, "root", "subscribe", signal)
    assert not may(policy, "root", "publish", signal)
    assert not may(policy, "root", "subscribe", call)
    assert not may(policy, "root", "publish", "org/x/S/T/call/org.x.I/Get")  # another name


def test_what_no_key_says():
    """A rule with more than names, interfaces and members is left out if it allows, and is wider if it denies."""
    allow = dbus('<policy context="default"><allow send_destination="a.b" send_path="/x"/></policy>')
    assert "[[rule]]" not in allow
    assert "send_path cannot be said of a key" in allow
    deny = dbus(
        '<policy user="bin"><allow send_destination="a.b"/><deny send_destination="*" send_path="/x"/></policy>'
    )
    assert 'deny_publish = ["*/call/*/*", "*/*/call/*/*"' in deny
    assert "it denies more than before: send_path" in deny


def test_rules_about_nothing_here():
    """Eavesdropping, descriptors and replies have no rule here, and long names none that D-Bus could not outdo."""
    long = ".".join("abcdefghi")
    rules = '<deny eavesdrop="true"/><deny send_type="error"/><deny min_fds="1"/>' + f'<allow own="{long}"/>'
    converted = dbus(f'<policy context="default"><allow send_destination="*"/>{rules}</policy>')
    assert converted.count("[[rule]]") == 1
    assert converted.count("not converted") == 4


def test_who_may_connect(tmp_path):
    """A user who may not connect may do nothing; the socket says who may."""
    text = dbus('<policy context="default"><allow user="*"/><deny user="bin"/><allow send_destination="a.b"/></policy>')
    policy = loaded(tmp_path, text)
    assert may(policy, "root", "publish", "a/b/call/i/m")
    assert not may(policy, "bin", "publish", "a/b/call/i/m")
    assert "--mode, --group and --allow-user" in text


@pytest.mark.parametrize(
    "text", ["<busconfig>", '<!DOCTYPE b [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><busconfig>&b;</busconfig>', "\0"]
)
def test_what_is_not_read(text):
    """Text that is no XML, and entities, which could grow without end, are errors with the file's name."""
    with pytest.raises(UsageError, match=r"^f\.conf: not XML"):
        convert_dbus.convert([("f.conf", text)])


NAMES = st.sampled_from(["a.b", "a.b.c", "*"])
PARTS = st.sampled_from(["i", "j", "*"])
ATTRIBUTES = st.one_of(
    st.builds(lambda name: {"own": name}, NAMES),
    st.builds(lambda name: {"own_prefix": name}, st.sampled_from(["a.b", "a"])),
    st.builds(
        lambda name, interface, member: {"send_destination": name, "send_interface": interface, "send_member": member},
        NAMES,
        PARTS,
        PARTS,
    ),
    st.builds(lambda name: {"send_destination": name, "send_path": "/x"}, NAMES),
    st.builds(lambda name, interface: {"receive_sender": name, "receive_interface": interface}, NAMES, PARTS),
)
WHO = st.sampled_from(['context="default"', 'context="mandatory"', 'user="daemon"', 'user="bin"'])
POLICIES = st.lists(
    st.builds(
        lambda who, rules: f"<policy {who}>" + "".join(rules) + "</policy>",
        WHO,
        st.lists(
            st.builds(
                lambda tag, words: f"<{tag} " + " ".join(f'{name}="{value}"' for name, value in words.items()) + "/>",
                st.sampled_from(["allow", "deny"]),
                ATTRIBUTES,
            ),
            max_size=4,
        ),
    ),
    max_size=3,
)


def dbus_allows(policies: list[str], user: str, verb: str, name: str, interface: str, member: str) -> bool:
    """What D-Bus does with a message whose path is not /x: the last rule that matches decides.

    :param verb: ``send`` (a call), ``own`` or ``receive`` (a signal).
    """
    order = {'context="default"': 0, f'user="{user}"': 1, 'context="mandatory"': 2}
    found = sorted(
        (policy for policy in policies if re.match("<policy (.*?)>", policy)[1] in order),  # type: ignore[index]
        key=lambda policy: order[re.match("<policy (.*?)>", policy)[1]],  # type: ignore[index]
    )
    is_allowed = False
    for each in (each for policy in found for each in ElementTree.fromstring(policy)):
        words = each.attrib
        if not any(word.startswith(verb) for word in words) or "send_path" in words:
            continue
        wanted = {
            f"{verb}_destination": name,
            f"{verb}_sender": name,
            "own": name,
            f"{verb}_interface": interface,
            f"{verb}_member": member,
        }
        if all(value in ("*", wanted.get(word, value)) for word, value in words.items()) and (
            "own_prefix" not in words or f"{name}.".startswith(f"{words['own_prefix']}.")
        ):
            is_allowed = each.tag == "allow"
    return is_allowed


@given(POLICIES, st.sampled_from(USERS), st.sampled_from(["a.b", "a.b.c", "a.d"]), PARTS, PARTS)
def test_nothing_of_dbus_is_wider(tmp_path_factory, policies, user, name, interface, member):
    """What the policy allows, D-Bus allows, too: to call, to own a name, to receive its signals."""
    text = dbus(*policies)
    policy = loaded(tmp_path_factory.getbasetemp(), text)
    base, interface, member = name.replace(".", "/"), interface.replace("*", "k"), member.replace("*", "k")
    call, signal = (f"{base}/{kind}/{interface}/{member}" for kind in ("call", "signal"))
    for verb, does, key in (
        ("send", "publish", call),
        ("own", "publish", signal),
        ("own", "subscribe", call),
        ("receive", "subscribe", signal),
    ):
        if may(policy, user, does, key):
            assert dbus_allows(policies, user, verb, name, interface, member), text


# --- the docs ------------------------------------------------------------------------------------------------------

EXAMPLES = ROOT / "docs" / "examples" / "convert"


@pytest.mark.parametrize(
    ("origin", "name"),
    [("dbus", "org.example.Sensors.conf"), ("mosquitto", "sensors.acl")],
)
def test_examples_of_the_docs(tmp_path, monkeypatch, origin, name):
    """The docs show what the command prints; it is a policy that loads."""
    monkeypatch.chdir(EXAMPLES)
    done = CliRunner().invoke(convert, [f"--from={origin}", name])
    assert done.exit_code == 0
    assert done.output == (EXAMPLES / name).with_suffix(".toml").read_text()
    loaded(tmp_path, done.output.replace('"sensord"', '"daemon"').replace('"alice"', '"bin"'))


def test_files_that_cannot_be_read(tmp_path):
    """An error names the file and the remedy; mosquitto has one file."""
    file = tmp_path / "acl"
    file.write_bytes(b"\xff")
    for arguments, error in (
        (["--from=dbus", str(tmp_path / "none")], "none: it cannot be read: No such file"),
        (["--from=mosquitto", str(file)], "acl: it is not UTF-8"),
    ):
        assert error in str(CliRunner().invoke(convert, arguments).exception)
    file.write_text("")
    assert "one at a time" in str(CliRunner().invoke(convert, ["--from=mosquitto", str(file), str(file)]).exception)


def test_containers_of_the_docs():
    """The containers of the docs speak for themselves alone, and read what the page says."""
    policy = load(str(ROOT / "docs" / "examples" / "containers.toml"), listeners=("main", "shop", "mail"))
    assert review(policy) == []

    def verdict(listener: str, verb: str, key: str, uid: int = 1000) -> bool:
        rights = policy.rights_of(Identity(uid, 99, frozenset(), listener, uid != 65534))
        if verb == "publish":
            return rights.publication(policy.zone(key.encode())).is_allowed
        return rights.subscription(key.encode()).is_allowed

    assert verdict("shop", "publish", "shop/orders/1")
    assert not verdict("mail", "publish", "shop/orders/1")
    assert not verdict("main", "publish", "shop/orders/1")
    assert verdict("mail", "subscribe", "shop/orders/")
    assert not verdict("mail", "subscribe", "shop/")
    assert not verdict("shop", "publish", "!/cred/0/0/1/x")
    assert verdict("shop", "publish", "elsewhere")
    assert verdict("shop", "publish", "shop/a", uid=65534)
    assert verdict("main", "subscribe", "", uid=0)
    assert not verdict("shop", "subscribe", "", uid=0)
