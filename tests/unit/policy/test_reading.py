"""Policy files: every mistake is an error with file, line and remedy, and loads nothing."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.errors import PolicyError
from sbus.policy import load
from sbus.policy.places import Places

HEAD = "version = 1\n"
RULE = HEAD + '[[rule]]\nname = "r"\n'
"""The next line of a file that begins like this is its fourth."""


def written(directory: Path, text: str | bytes, name: str = "p.toml") -> str:
    """Write a policy file, and return its path."""
    path = directory / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


MISTAKES = {
    "no version": ("\n", 1, "begin the file with `version = 1`"),
    "another version": ("# x\nversion = 2\n", 2, "update sbus"),
    "a version that is true": ("version = true\n", 1, "write `version = 1`"),
    "an unknown field at the top": (HEAD + 'defualt = "deny"\n', 2, "did you mean default?"),
    "an unknown table": (HEAD + "\n[rules]\n", 3, "did you mean rule?"),
    "a rule that is no array": (HEAD + '[rule]\nname = "r"\n', 2, "write [[rule]] above each"),
    "rules in line": (HEAD + 'rule = [{name = "r", publish = ["a"]}]\n', 2, "write [[rule]] above each"),
    "a field of no table": (HEAD + 'rule = "x"\n', 2, "write [[rule]] above each"),
    "an unknown default": (HEAD + 'default = "closed"\n', 2, 'write "allow" or "deny"'),
    "a default of another type": (HEAD + "default = [1]\n", 2, 'write "allow" or "deny"'),
    "an unknown mode": (HEAD + 'mode = "log"\n', 2, 'write "enforce" or "audit"'),
    "closed that is no list": (HEAD + 'closed = "a/"\n', 2, "closed must be a list of strings"),
    "closed that names secrets": (HEAD + 'closed = ["!/cred/"]\n', 2, "only deny_publish may name"),
    "an unknown field": (RULE + 'publich = ["a"]\n', 4, "did you mean publish?"),
    "a field that nothing is like": (RULE + "colour = 2\n", 4, "the fields are name, users"),
    "a table in a rule": (RULE + "[rule.publish]\na = 1\n", 4, "publish must be a list of strings"),
    "a dotted field": (RULE + "publish.a = 1\n", 4, "publish must be a list of strings"),
    "no name": (HEAD + '[[rule]]\npublish = ["a"]\n', 2, 'add name = "…"'),
    "a name of another type": (HEAD + "[[rule]]\nname = 1\n", 3, "name must be a string"),
    "a name that is none": (HEAD + '[[rule]]\nname = "a b"\n', 3, "use letters, digits"),
    "a reserved name": (HEAD + '[[rule]]\nname = "default"\n', 3, "choose another one"),
    "a name twice": (RULE + 'publish = ["a"]\n' + RULE[len(HEAD) :], 6, "p.toml:2 is called 'r' too"),
    "a rule without effect": (RULE + "users = [1]\npublish = []\n", 2, "give it one of publish"),
    "audit alone": (RULE + "audit = true\n", 2, "has no effect"),
    "patterns that are no list": (RULE + 'publish = "a"\n', 4, 'write publish = ["sensors/"]'),
    "a pattern that is no string": (RULE + "publish = [1]\n", 4, "must be a list of strings"),
    "an impossible pattern": (RULE + 'subscribe = [\n "a",\n "a/*b"\n]\n', 4, "end the segment with '*'"),
    "an impossible pattern in deny": (RULE + 'deny_subscribe = ["*b"]\n', 4, "end the segment with '*'"),
    "a NUL": (RULE + 'publish = ["a\\u0000"]\n', 4, "a NUL ends a key"),
    "a bare !": (RULE + 'publish = ["!"]\n', 4, "has a segment '!'"),
    "a ! within": (RULE + 'deny_publish = ["a/!/b"]\n', 4, "has a segment '!'"),
    "secrets in publish": (RULE + 'publish = ["!/cred/1/2/3/"]\n', 4, "only deny_publish may name"),
    "secrets in subscribe": (RULE + 'subscribe = ["!/cred/"]\n', 4, "only deny_publish may name"),
    "secrets in subscribe_exact": (RULE + 'subscribe_exact = ["!/cred///x"]\n', 4, "only deny_publish may name"),
    "secrets in deny_subscribe": (RULE + 'deny_subscribe = ["!/cred/"]\n', 4, "only deny_publish may name"),
    "a user's name in a secret key": (RULE + 'deny_publish = ["!/cred/root/"]\n', 4, "write numbers"),
    "a secret key that is too short": (RULE + 'deny_publish = ["!/cred/1/2/3"]\n', 4, "let it end with '/'"),
    "an impossible secret pattern": (RULE + 'deny_publish = ["!/cred/*/*/*/*x"]\n', 4, "end the segment with '*'"),
    "an unknown user": (RULE + 'publish = ["a"]\nusers = ["no-such-user"]\n', 5, "`getent passwd`"),
    "an unknown group": (RULE + 'publish = ["a"]\ngroups = ["no-such-group"]\n', 5, "`getent group`"),
    "a user with a NUL": (RULE + 'publish = ["a"]\nusers = ["r\\u0000"]\n', 5, "`getent passwd`"),
    "a UID that none has": (RULE + 'publish = ["a"]\nusers = [4294967295]\n', 5, "a number from 0 to"),
    "a UID below 0": (RULE + 'publish = ["a"]\nusers = [-1]\n', 5, "a number from 0 to"),
    "a GID that none has": (RULE + 'publish = ["a"]\ngroups = ["4294967295"]\n', 5, "a number from 0 to"),
    "the overflow UID": (RULE + 'publish = ["a"]\nusers = [65534]\n', 5, "matches nobody"),
    "the overflow GID": (RULE + 'publish = ["a"]\ngroups = [65534]\n', 5, "matches nobody"),
    "users that are true": (RULE + 'publish = ["a"]\nusers = [true]\n', 5, "a list of names and numbers"),
    "users that are no list": (RULE + 'publish = ["a"]\nusers = "root"\n', 5, "a list of names and numbers"),
    "no users": (RULE + 'publish = ["a"]\nusers = []\n', 5, "leave users out to match all"),
    "no groups": (RULE + 'publish = ["a"]\ngroups = []\n', 5, "leave groups out to match all"),
    "no listeners": (RULE + 'publish = ["a"]\nlisteners = []\n', 5, "leave listeners out to match all"),
    "a listener that cannot be": (RULE + 'publish = ["a"]\nlisteners = ["a b"]\n', 5, "use letters, digits"),
    "an unknown listener": (RULE + 'publish = ["a"]\nlisteners = ["ap"]\n', 5, "add --listen=ap=ADDRESS"),
    "a rate of nothing": (RULE + "max_rate = 0\n", 4, "to allow none, use deny_publish"),
    "a rate that is no number": (RULE + "max_rate = nan\n", 4, "a number of messages a second"),
    "a rate without end": (RULE + "max_rate = inf\n", 4, "a number of messages a second"),
    "a rate that is true": (RULE + "max_rate = true\n", 4, "a number of messages a second"),
    "a rate that is text": (RULE + 'max_rate = "9"\n', 4, "a number of messages a second"),
    "a rate beyond numbers": (RULE + f"max_rate = 1{'0' * 400}\n", 4, "leave it out"),
    "a rate of too many digits": (RULE + f"max_rate = 1{'0' * 5000}\n", 1, "not TOML"),
    "payload that is text": (RULE + 'payload = "no"\n', 4, "true or false, without quotes"),
    "audit that is a number": (RULE + 'publish = ["a"]\naudit = 1\n', 5, "true or false, without quotes"),
    "limits without users": (HEAD + "[[limits]]\nclients = 1\n", 2, "name those whose shares it gives"),
    "limits without effect": (HEAD + "[[limits]]\nusers = [1]\n", 2, "give one of memory"),
    "limits of nobody": (HEAD + "[[limits]]\nusers = []\nclients = 1\n", 3, "users is empty"),
    "an unknown limit": (HEAD + "[[limits]]\nusers = [1]\nclient = 1\n", 4, "did you mean clients?"),
    "a limit of nothing": (HEAD + "[[limits]]\nusers = [1]\nclients = 0\n", 4, "1 or more"),
    "a limit that is no number": (HEAD + "[[limits]]\nusers = [1]\naccepts = 1.5\n", 4, "a whole number"),
    "memory that is no size": (HEAD + '[[limits]]\nusers = [1]\nmemory = "1 gig"\n', 4, '"64M" or "1G"'),
    "memory that is a list": (HEAD + "[[limits]]\nusers = [1]\nmemory = []\n", 4, '"64M" or "1G"'),
    "memory for no client": (HEAD + '[[limits]]\nusers = [1]\nmemory = "63K"\n', 4, "at least 65536"),
    "memory of 0": (HEAD + "[[limits]]\nusers = [1]\nmemory = 0\n", 4, "at least 65536"),
    "a number that is no rate": (HEAD + f"[[limits]]\nusers = [1]\naccepts = 1{'0' * 400}\n", 4, "whole number"),
    "no TOML": (HEAD + "\nclosed = [\n", 4, "not TOML"),
    "a field twice": (HEAD + "\nversion = 1\n", 3, "not TOML"),
    "a string that does not end": (HEAD + '[[rule]]\nname = "r\n', 3, "not TOML"),
    "values too deep": (HEAD + f"closed = {'[' * 5000}{']' * 5000}\n", 1, "nested too deeply"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_names_file_line_and_remedy(mistake: str, tmp_path: Path) -> None:
    """Each rule of the files, broken once."""
    text, line, remedy = MISTAKES[mistake]
    path = written(tmp_path, text)
    with pytest.raises(PolicyError) as found:
        load(path, listeners=("main", "app"))
    assert str(found.value).startswith(f"{path}:{line}: "), found.value
    assert remedy in str(found.value)
    assert "\n" not in str(found.value)


def test_bytes_that_are_no_utf8_name_their_line(tmp_path: Path) -> None:
    """TOML is UTF-8."""
    path = written(tmp_path, b"version = 1\n# \xe4\n")
    with pytest.raises(PolicyError, match=r"p\.toml:2: byte 0xe4 is not UTF-8.*save the file as UTF-8"):
        load(path)


class TestFiles:
    """What can be wrong with the files themselves."""

    def test_a_missing_file_is_an_error(self, tmp_path: Path) -> None:
        """A policy that is not there must not mean that there is none."""
        with pytest.raises(PolicyError, match="there is no such file: write one"):
            load(str(tmp_path / "p.toml"))

    def test_an_empty_directory_is_an_error(self, tmp_path: Path) -> None:
        """Hidden files and others do not count."""
        written(tmp_path, HEAD, ".p.toml")
        written(tmp_path, HEAD, "p.toml.bak")
        with pytest.raises(PolicyError, match=r"there is no \*\.toml in this directory: put a policy there"):
            load(str(tmp_path))

    def test_a_file_that_is_none_is_an_error(self, tmp_path: Path) -> None:
        """A pipe in a directory of policies does not hang its reader; a directory is none either."""
        os.mkfifo(tmp_path / "a.toml")
        with pytest.raises(PolicyError, match=r"a\.toml: this is no plain file"):
            load(str(tmp_path))
        (tmp_path / "a.toml").unlink()
        (tmp_path / "a.toml").mkdir()
        before = os.listdir("/proc/self/fd")
        for _ in range(3):
            with pytest.raises(PolicyError, match=r"a\.toml: this is no plain file"):
                load(str(tmp_path))
        assert os.listdir("/proc/self/fd") == before

    def test_a_path_that_cannot_be_read_is_an_error(self, tmp_path: Path) -> None:
        """The kernel's reason is in the text."""
        (tmp_path / "a.toml").symlink_to("a.toml")
        with pytest.raises(PolicyError, match=r"a\.toml: cannot be read: .*; let the bus's user read it"):
            load(str(tmp_path))

    def test_files_of_a_directory_are_one_policy(self, tmp_path: Path) -> None:
        """Tables of all files count, whatever the files are called."""
        written(tmp_path, HEAD + 'default = "deny"\n[[rule]]\nname = "a"\npublish = ["a"]\n', "2.toml")
        written(tmp_path, HEAD + 'default = "deny"\nclosed = ["c"]\n[[rule]]\nname = "b"\npublish = ["b"]\n', "1.toml")
        policy = load(str(tmp_path))
        assert [os.path.basename(file) for file in policy.files] == ["1.toml", "2.toml"]
        assert [rule.name for rule in policy.rules] == ["b", "a"]
        assert [rule.where for rule in policy.rules] == [f"{tmp_path}/1.toml:4", f"{tmp_path}/2.toml:3"]

    @pytest.mark.parametrize(("field", "one", "other"), [("default", "allow", "deny"), ("mode", "audit", "enforce")])
    def test_files_must_not_disagree(self, field: str, one: str, other: str, tmp_path: Path) -> None:
        """No order decides between two values."""
        written(tmp_path, HEAD + f'{field} = "{one}"\n', "1.toml")
        written(tmp_path, HEAD + f'\n{field} = "{other}"\n', "2.toml")
        with pytest.raises(PolicyError, match=rf"2\.toml:3: {field} is '{other}' here, and '{one}' at .*1\.toml:2"):
            load(str(tmp_path))

    def test_each_file_has_a_version(self, tmp_path: Path) -> None:
        """A later sbus can tell what a file means without its neighbours."""
        written(tmp_path, HEAD, "1.toml")
        written(tmp_path, "closed = []\n", "2.toml")
        with pytest.raises(PolicyError, match=r"2\.toml:1: there is no version"):
            load(str(tmp_path))

    def test_a_name_is_unique_over_all_files(self, tmp_path: Path) -> None:
        """A refusal names one rule."""
        written(tmp_path, RULE + 'publish = ["a"]\n', "1.toml")
        written(tmp_path, RULE + 'publish = ["a"]\n', "2.toml")
        with pytest.raises(PolicyError, match=r"2\.toml:3: the rule at .*1\.toml:2 is called 'r' too"):
            load(str(tmp_path))


VALUES = (
    '"a"', "'[[rule]]'", '"""\n[[rule]]\n"""', "'''\nx = 1\n'''", "[1, # [\n 2]", '{a = "]", b = [{}]}', '"\\"" # "',
    "1.5", '""', "''", '""""""', "''''''", '"""a""""', "'''a'''''", '[[1], ["]"]]', "[\n[\n]\n]",
    "1979-05-27T07:32:00Z",
    '"""\\"""\\\n"""', "true # [[rule]]", "0x1f", '"\\\\"',
)  # fmt: skip
KEYS = ("a{}", '"b {}"', "'c.{}'", "d{}.e", ' f{} . "g" ')


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "[[rule]]", "[[limits]] # ]", "\n#[\n"]),
            st.sampled_from(KEYS),
            st.sampled_from(VALUES),
        )
    )
)
def test_lines_are_found_whatever_the_values_are(statements: list[tuple[str, str, str]]) -> None:
    """Each header and each key has the line at which it was written."""
    text, top = "", dict[str, int]()
    tables: dict[str, list[dict[str, int]]] = {}
    here = top
    for number, (header, key, value) in enumerate(statements):
        text += header + "\n"
        if header.startswith("[["):
            here = {"": text.count("\n")}
            tables.setdefault(header[2:-2].partition("]")[0], []).append(here)
        here[key.format(number).split(".")[0].strip() if key[0] != "'" else f"c.{number}"] = text.count("\n") + 1
        text += f"{key.format(number)} = {value}\n"
    for table in (top, *(table for found in tables.values() for table in found)):
        for name in [name for name in table if name.startswith('"')]:
            table[name[1:-1]] = table.pop(name)
    tomllib.loads(text)
    places = Places(text)
    assert places.top == top
    assert places.tables == tables


def test_limits_come_in_their_order(tmp_path: Path) -> None:
    """Numbers, sizes with a unit, and where they stand."""
    path = written(
        tmp_path,
        HEAD + '[[limits]]\nusers = ["root", 7]\nclients = 4096\npatterns = 100_000\nmemory = "1G"\naccepts = 1000\n'
        "[[limits]]\nusers = [7]\nmemory = 65536\n",
    )
    one, other = load(path).limits
    assert one == (frozenset({0, 7}), 4096, 100_000, 1 << 30, 1000, f"{path}:2")
    assert other == (frozenset({7}), None, None, 65536, None, f"{path}:8")


def test_users_and_groups_are_names_or_numbers(tmp_path: Path) -> None:
    """Numbers may be unknown to the system, and may be strings."""
    path = written(tmp_path, RULE + 'publish = ["a"]\nusers = ["root", 123456, "7"]\ngroups = ["root", 9]\n')
    [rule] = load(path).rules
    assert rule.users == frozenset({0, 123456, 7})
    assert rule.groups == frozenset({0, 9})


def test_lines_are_those_of_an_editor() -> None:
    """Strings over several lines, brackets and comments hide no header and no key, and make none."""
    text = '''version = 1 # [[rule]]
closed = [ # a comment with "quotes' and ]
  "a", """
[[rule]]
name = "x\\""""", \'\'\'
[[rule]]'\'\'\',
  "#", '[[rule]]', "\\"[["
]
"mode" = "audit"
[[rule]]   # [[limits]]
'name' = "r"
"pub\\u006cish" = ["""
"""]
rule.x = {a = 1, b = "]"}
[[rule.deny]]
name = 1
[[ "rule" ]]
name="s"
[rule.more]
a = 1
[[limits]]'''
    places = Places(text)
    assert places.top == {"version": 1, "closed": 2, "mode": 9}
    assert places.tables["rule"] == [
        {"": 10, "name": 11, "publish": 12, "rule": 14, "deny": 15},
        {"": 17, "name": 18, "more": 19},
    ]
    assert places.tables["limits"] == [{"": 21}]
