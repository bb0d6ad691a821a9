"""The units under a real systemd: the services do their work with all that the units take from them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
SYSTEMD = Path("/lib/systemd/systemd")
SBUS = "/srv/sbus/.venv/bin/sbus"


class Machine:
    """A systemd in namespaces of its own (``boot-systemd``), with the units of the docs.

    :param directory: an empty directory.
    """

    def __init__(self, directory: Path) -> None:
        self._output = (directory / "output").open("w+b")
        mount = directory / "mount"
        mount.mkdir()
        self._unshare = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig=KILL"),  # it ends with the tests, however they end
                *("unshare", "--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net", "--fork", "--kill-child"),
                *(Path(__file__).with_name("boot-systemd"), mount, ROOT),
                *(sys.base_prefix, sysconfig.get_path("purelib")),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_started(self) -> None:
        """Wait until systemd answers; skip the test if this machine does not let it start."""
        wait_until(lambda: self._unshare.poll() is not None or self._answers(), timeout=60)
        if self._unshare.poll() is not None:
            self._output.seek(0)
            why = self._output.read().decode(errors="replace").strip().splitlines() or ["no reason was printed"]
            pytest.skip(f"this machine lets no systemd start in namespaces: {why[-1]}")

    def _answers(self) -> bool:
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()
        if not children or Path(f"/proc/{children[0]}/comm").read_text() != "systemd\n":
            return False
        self._init = children[0]
        return self.run("systemctl", "show", "--property=Version").returncode == 0

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command as root in the machine."""
        return subprocess.run(
            ["nsenter", f"--target={self._init}", "--all", "env", "LD_LIBRARY_PATH=/srv/sbus/python/lib", *command],
            capture_output=True,
            text=True,
            timeout=120,
        )

    def output(self, *command: str) -> str:
        """Return the output of a command, which must succeed."""
        done = self.run(*command)
        assert done.returncode == 0, done.stdout + done.stderr + self.journal()
        return done.stdout

    def journal(self) -> str:
        return self.run("journalctl", "--no-pager", "--unit=sbus*").stdout

    def put(self, path: str, text: str) -> None:
        """Write a file in the machine."""
        self.output("sh", "-c", 'mkdir -p "$(dirname "$1")"; printf %s "$2" >"$1"', "sh", path, text)

    def stop(self) -> None:
        self._unshare.kill()
        self._unshare.wait()
        self._output.close()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if os.geteuid() != 0:
        pytest.skip("namespaces with a systemd need root: run this as root")
    if not SYSTEMD.exists():
        pytest.skip("systemd is not installed: apt-get install systemd")
    if shutil.which("nsenter") is None:
        pytest.skip("nsenter is not installed: apt-get install util-linux")
    machine = Machine(tmp_path_factory.mktemp("machine"))
    try:
        machine.wait_started()
        machine.output("usermod", "--append", "--groups=bus", "daemon")
        yield machine
    finally:
        machine.stop()


def as_user(machine: Machine, *words: str) -> str:
    """Run ``sbus`` as an ordinary user who may use the bus."""
    return machine.output("runuser", "--user=daemon", "--", SBUS, "--socket=/run/sbus.sock", *words)


@pytest.mark.slow
def test_the_bus_and_the_recorder(machine: Machine) -> None:
    """The bus knows its clients, routes, answers operators; the recorder records, and writes its metrics for all."""
    machine.output("systemctl", "start", "sbus.socket", "sbus-admin.socket", "sbus.service", "sbus-recorder.service")
    state = machine.output("sh", "-c", "cat /proc/$(systemctl show --property=MainPID --value sbus)/status")
    status = dict(line.split(":\t", 1) for line in state.splitlines() if ":\t" in line)
    assert (int(status["CapBnd"], 16), status["NoNewPrivs"], status["Seccomp"]) == (0, "1", "2")
    uid = machine.output("id", "-u", "daemon").strip()
    assert f"/{uid}/" in as_user(machine, "whoami")  # a secret key, which a user namespace would refuse
    as_user(machine, "pub", "hello", "world")
    journal = wait_until(
        lambda: machine.run(SBUS, "journal", "cat", "/var/lib/sbus/journal").stdout, lambda found: "hello" in found
    )
    assert "world" in journal
    assert "clients" in machine.output(SBUS, "status")
    metrics = wait_until(lambda: machine.run("stat", "-c", "%a", "/var/cache/sbus-metrics/recorder.prom").stdout)
    assert int(metrics, 8) & 0o004
    machine.output("systemctl", "stop", "sbus-recorder.service", "sbus.service")
    results = machine.output("systemctl", "show", "--property=Result", "--value", "sbus", "sbus-recorder")
    assert results.split() == ["success", "success"]


@pytest.mark.slow
def test_a_bus_that_makes_its_socket(machine: Machine) -> None:
    """Without socket activation the bus makes its socket, and gives it to the group; its directory stays."""
    machine.output("systemctl", "start", "sbus-alone.service")
    found = machine.output("stat", "-c", "%U %G %a", "/run/sbus/sbus.sock", "/run/sbus/sbus.sock.admin", "/run/sbus")
    assert found.splitlines() == ["sbus bus 770", "sbus sbus 600", "sbus sbus 755"]
    assert "answer from" in machine.output(
        "runuser", "--user=daemon", "--", SBUS, "--socket=/run/sbus/sbus.sock", "ping", "--count=1"
    )
    machine.output("systemctl", "stop", "sbus-alone.service")
    assert machine.output("ls", "-A", "/run/sbus") == ""


@pytest.mark.slow
def test_a_bus_with_sidecars(machine: Machine) -> None:
    """What the page says to add for --record and --listen is enough."""
    machine.put(
        "/etc/systemd/system/sbus.service.d/more.conf",
        "[Service]\nExecStart=\n"
        "ExecStart=/srv/sbus/.venv/bin/twistd --nodaemon sbus --socket=systemd:sbus --record=/var/lib/sbus/beside"
        " --listen=app1=/run/sbus/app1.sock,group=bus,mode=0770\n"
        "StateDirectory=sbus\nReadWritePaths=/run/sbus\nSystemCallFilter=@chown\nSystemCallErrorNumber=EPERM\n",
    )
    machine.output("systemctl", "daemon-reload")
    machine.output("systemctl", "start", "sbus.socket", "sbus-admin.socket")
    machine.output("systemctl", "restart", "sbus.service")
    assert machine.output("stat", "-c", "%U %G %a", "/run/sbus/app1.sock").split() == ["sbus", "bus", "770"]
    wait_until(machine.journal, lambda said: "recorder: recording" in said)
    as_user(machine, "pub", "hello", "world")
    machine.output("systemctl", "stop", "sbus.service")
    assert "started again" not in machine.journal()
    assert "hello world" in machine.output(SBUS, "journal", "cat", "/var/lib/sbus/beside")


@pytest.mark.slow
def test_reload(machine: Machine) -> None:
    """systemctl reload puts a policy into force; it fails at a broken one, and the bus goes on with the one before."""
    machine.put(
        "/etc/systemd/system/sbus.service.d/more.conf",
        "[Service]\nExecStart=\n"
        "ExecStart=/srv/sbus/.venv/bin/twistd --nodaemon sbus --socket=systemd:sbus --policy=/etc/sbus/policy.d\n",
    )
    policy = "/etc/sbus/policy.d/a.toml"
    machine.put(policy, "version = 1\n")
    machine.output("systemctl", "daemon-reload")
    machine.output("systemctl", "start", "sbus.socket", "sbus-admin.socket")
    machine.output("systemctl", "restart", "sbus.service")
    as_user(machine, "pub", "a/b", "x")
    machine.put(policy, 'version = 1\nclosed = ["a/"]\n')
    machine.output("systemctl", "reload", "sbus.service")
    assert machine.run("runuser", "--user=daemon", "--", SBUS, "--socket=/run/sbus.sock", "pub", "a/b", "x").returncode
    machine.put(policy, "version = 2\n")
    assert machine.run("systemctl", "reload", "sbus.service").returncode
    assert f"{policy}:1: " in machine.journal()
    assert machine.output("systemctl", "show", "--property=ActiveState", "--value", "sbus") == "active\n"
    as_user(machine, "pub", "elsewhere", "x")


@pytest.mark.slow
def test_the_bridge(machine: Machine) -> None:
    """The bridge to NATS starts, and goes on trying to reach its server.

    It has no credentials here: in a nested systemd, services may not enter the directory of theirs.
    """
    machine.put(
        "/etc/systemd/system/sbus-nats.service.d/plain.conf",
        "[Service]\nLoadCredential=\nExecStart=\nExecStart=/srv/sbus/.venv/bin/twistd --nodaemon sbus-nats"
        " --socket=/run/sbus.sock --state=/var/lib/sbus-nats/state --nats=nats://127.0.0.1:9 --out=sensors/\n",
    )
    machine.output("systemctl", "daemon-reload")
    machine.output("systemctl", "start", "sbus.socket", "sbus-admin.socket")
    machine.run("systemctl", "start", "--no-block", "sbus-nats.service")
    wait_until(machine.journal, lambda said: "NATS cannot be reached" in said)
    assert machine.run("systemctl", "show", "--property=Result", "--value", "sbus-nats").stdout.strip() != "signal"
