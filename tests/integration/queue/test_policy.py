"""The policy of the page on queues, with clients of several users."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import sbus
from tests.support import ROOT
from tests.support.harness import OTHER_USER, THIRD_USER
from tests.support.queues import QueueProcess, WorkerProcess, ask
from tests.support.servers import StartBus


def test_who_may_take_jobs(bus: StartBus, spawn: Callable[..., Any], directory: Path, as_root: None) -> None:
    """The user of the rule gets the job; another one is refused, and an ack in that one's name does not count."""
    text = (ROOT / "docs" / "examples" / "queue-policy.toml").read_text()
    policy = directory / "policy.toml"
    policy.write_text(text.replace("thumbnailer", str(OTHER_USER[0])).replace('"sbus"', '"root"'))
    server = bus(f"--policy={policy}", "--mode=777")
    spawn(QueueProcess, directory, server.address, "--queue=thumbnails").wait_started()
    with sbus.connect(str(server.address)) as publisher:
        assert publisher.enqueue("thumbnails", "k", b"a picture") == 1
    stranger = server.client(user=THIRD_USER)
    stranger.send(b"CMSG denied/on")
    assert stranger.recv() == b"CMSG denied/on\0"
    stranger.msg(b"queue/thumbnails/ready", b"ab 1 1")
    assert stranger.recv().startswith(b"CMSG denied\0MSG queue/thumbnails/ready closed")
    with WorkerProcess(server.address, "thumbnails", user=OTHER_USER) as worker:
        assert worker.next_job() == 1
        with sbus.connect(str(server.address)) as root:
            for token in (b"ab", b"0" * 32):
                root.publish("queue/thumbnails/ack", token + b" 1 1")
            root.fence()
        assert ask(server.address, "ls", "thumbnails")["jobs"]["out"] == 1


def test_a_service_that_may_not_serve(bus: StartBus, spawn: Callable[..., Any], directory: Path, as_root: None) -> None:
    """A service whose subscriptions the policy refuses ends, and its log names the rule; it is never ready."""
    policy = directory / "policy.toml"
    policy.write_text('version = 1\nclosed = ["queue/"]\n')
    server = bus(f"--policy={policy}")
    service = spawn(QueueProcess, directory, server.address, "--queue=jobs=jobs/")
    assert service.wait() == 1
    assert service.log.count("queue jobs: this client may not subscribe to 'queue/jobs/") == 1
    assert "ready" not in service.log
