"""The page of ``sbus web`` in Chromium, on a real bus under load."""

from __future__ import annotations

import getpass
import http.client
import http.server
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import OTHER_USER, REBOUND, Web, run_web
from playwright.sync_api import Browser, Locator, Page, expect

from sbus.client.blocking import connect
from sbus.testing import RunningBus
from tests.support.queues import QueueProcess

OpenPage = Callable[..., Page]
AXE = Path(__file__).parent.parent / "node_modules" / "axe-core" / "axe.min.js"

expect.set_options(timeout=15_000)


def number(text: str | None) -> float:
    """Return the number at the beginning of a text of the page."""
    found = re.match(r"[\d.,]+", text or "")
    assert found, text
    return float(found[0].replace(",", ""))


def figure(page: Page, tile: str) -> float:
    return number(page.text_content(f'[data-tile="{tile}"] .figure'))


def wait_for_figure(page: Page, tile: str, is_right: Callable[[float], bool]) -> None:
    deadline = time.monotonic() + 15
    while True:
        text = page.text_content(f'[data-tile="{tile}"] .figure') or ""
        if re.match(r"\d", text) and is_right(number(text)):
            return
        assert time.monotonic() < deadline, f"{tile} is {text}"
        page.wait_for_timeout(100)


def go(page: Page, view: str) -> None:
    page.get_by_role("navigation").get_by_role("link", name=view).click()


# --- the link ----------------------------------------------------------------------------------


def test_the_token_leaves_the_address_bar(web: Web, open_page: OpenPage) -> None:
    """The page moves the token into the tab's memory: neither the address nor a cookie holds it, and a reload works."""
    page = open_page(web.link)
    expect(page.locator("#live")).to_have_text("Live")
    assert web.token not in page.url
    assert page.evaluate("Object.values(sessionStorage)") == [web.token]
    assert page.context.cookies() == []
    page.reload()
    expect(page.locator("#live")).to_have_text("Live")


def test_without_the_token_the_page_is_empty(web: Web, browser: Browser) -> None:
    """The page without the token says what is missing, and shows nothing of the bus."""
    page = browser.new_page()
    page.goto(web.origin)
    expect(page.locator("#problem")).to_contain_text("the link that sbus web has printed")
    expect(page.locator("#live")).to_have_text("Refused")
    page.close()


def test_nothing_comes_from_elsewhere(web: Web, browser: Browser) -> None:
    """The page loads its own files and nothing else."""
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(web.link)
    expect(page.locator("#live")).to_have_text("Live")
    for view in ("Clients", "Messages"):
        go(page, view)
        page.wait_for_timeout(300)
    assert {url.partition("/")[0] + "//" + url.split("/")[2] for url in asked} == {web.origin}
    page.close()


# --- the panels --------------------------------------------------------------------------------


def test_the_status_line(web: Web, open_page: OpenPage) -> None:
    """The line on top has the rates of the load, the receivers that lag, and the queues against their limit."""
    page = open_page(web.link)
    wait_for_figure(page, "published", lambda value: value > 200)
    wait_for_figure(page, "delivered", lambda value: value > 400)
    wait_for_figure(page, "unrouted", lambda value: value > 3)
    wait_for_figure(page, "lagging", lambda value: value >= 1)
    assert figure(page, "held") == 0
    wait_for_figure(page, "clients", lambda value: value >= 13)
    meter = page.get_by_role("meter", name="Queues against the limit")
    expect(meter).to_have_attribute("aria-valuetext", re.compile(r"iB of 256 MiB"))


def test_rates(web: Web, open_page: OpenPage) -> None:
    """The chart is drawn, begins before the page was opened, and has a summary and a table."""
    page = open_page(web.link)
    expect(page.locator("#rates-plot canvas")).to_be_visible()
    expect(page.locator("#rates-summary")).to_have_text(re.compile(r"Published: [\d,]+ a second now"))
    inked = """canvas => {
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return data.some((value, at) => at % 4 === 3 && value > 200);
    }"""
    assert page.eval_on_selector("#rates-plot canvas", inked)
    page.locator(".rates summary").click()
    cells = page.locator("#rates-table tbody tr").first.locator("td")
    expect(cells).to_have_count(6)
    assert number(cells.nth(1).text_content()) > 50
    button = page.get_by_role("button", name="Delivered")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "false")


def test_who_talks_to_whom(web: Web, open_page: OpenPage) -> None:
    """Publishers, prefixes and receivers are there with their rates, in the drawing and in the table."""
    page = open_page(web.link)
    for column, names in enumerate(
        [
            ["thermod", "plc", "shop"],
            ["sensors/hall/", "plant/line1/", "orders/paid"],
            ["dashboard", "alarms", "nobody"],
        ]
    ):
        for name in names:
            expect(page.locator(f".column-{column} .label", has_text=re.compile(f"^{name}$"))).to_be_visible()
    page.locator(".talk summary").click()
    row = page.locator("#talk-table tr", has_text="plc").filter(has_text="plant/line2/")
    expect(row).to_have_count(1)
    page.wait_for_timeout(2000)
    assert 25 < number(row.locator("td").last.text_content()) < 65
    page.locator("#depth").fill("1")
    expect(page.locator(".column-1 .label", has_text=re.compile("^plant/$"))).to_be_visible()
    expect(page.locator(".column-1 .label", has_text="plant/line1/")).to_have_count(0)


def test_a_node_shows_its_links(web: Web, open_page: OpenPage) -> None:
    """A bar can be reached and kept with the keyboard; its links are emphasised, and Escape ends that."""
    page = open_page(web.link)
    node = page.get_by_role("button", name=re.compile("^shop"))
    node.focus()
    page.keyboard.press("Enter")
    expect(node).to_have_attribute("aria-pressed", "true")
    expect(page.locator('.ribbons path.lit[data-from^="0shop"]').first).to_be_attached()
    assert page.locator('.ribbons path.lit[data-from^="0plc"]').count() == 0
    page.keyboard.press("Escape")
    expect(node).to_have_attribute("aria-pressed", "false")


def test_nobody_subscribed(web: Web, open_page: OpenPage) -> None:
    """Keys that no client wants are listed with their rates; one click puts a key into the form."""
    page = open_page(web.link)
    row = page.locator("#unrouted-table tr", has_text="status/fan/rpm")
    expect(row).to_be_visible()
    assert page.locator("#unrouted-table tr", has_text="sensors/").count() == 0
    row.get_by_role("button").click()
    expect(page.locator("#publish-key")).to_have_value("status/fan/rpm")


def test_not_allowed(web: Web, loaded: RunningBus, open_page: OpenPage) -> None:
    """What users had no permission for has a row by user and rule; without any there is no panel."""
    page = open_page(web.link)
    wait_for_figure(page, "published", lambda value: value > 0)
    expect(page.locator("#denied")).to_be_hidden()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(loaded.address)
        sock.send(b"CMSG denied/on")
        for number in range(3):
            sock.send(b"MSG forbidden/%d\0" % number)
        cells = page.locator("#denied-table tbody tr").first.locator("td")
        expect(cells).to_have_text([getpass.getuser(), "no-forbidden", "3", re.compile("now|ago")])
    expect(page.get_by_role("region", name="Refusals by user and rule")).to_be_visible()


def test_queues(web: Web, loaded: RunningBus, directory: Path, open_page: OpenPage) -> None:
    """A queue has a row with its jobs by state and its workers while its service runs; else there is no panel."""
    page = open_page(web.link)
    wait_for_figure(page, "published", lambda value: value > 0)
    expect(page.locator("#queues")).to_be_hidden()
    service = QueueProcess(directory, loaded.address, "--queue=jobs").wait_started()
    try:
        with connect(loaded.address) as bus:
            for _ in range(3):
                bus.enqueue("jobs", "k")
            bus.enqueue("jobs", "later", delay=1000)
            work = iter(bus.work("jobs"))
            next(work).nack("poison")
            job = next(work)
            cells = page.locator("#queues-table tbody tr").first.locator("td")
            expect(cells).to_have_text(["jobs", "1", "0", "1", "1", "1", "1", "–"])
            job.ack()
        expect(page.get_by_role("region", name="Queues and their jobs")).to_be_visible()
    finally:
        service.stop()
    expect(page.locator("#queues")).to_be_hidden()


def test_clients(web: Web, loaded: RunningBus, open_page: OpenPage) -> None:
    """The table has who lags first, with user, listener, strategy and losses; it can be sorted and searched."""
    page = open_page(web.link + "")
    go(page, "Clients")
    rows = page.locator("#clients-table tbody tr")
    expect(rows.first).to_contain_text("archive")
    expect(rows.first).to_contain_text("lagging")
    expect(rows.first).to_contain_text("main")
    page.get_by_role("button", name="Lost").click()
    expect(page.locator("th[aria-sort=descending]")).to_have_text("Lost")
    expect(rows.first).to_contain_text("slowview")
    expect(rows.first).to_contain_text("discard")
    page.get_by_label("Find").fill("plc")
    expect(rows).to_have_count(1)


def test_a_held_publisher(web: Web, loaded: RunningBus, open_page: OpenPage) -> None:
    """A publisher that a receiver blocks is counted as held, and names that receiver."""
    page = open_page(web.link)
    go(page, "Clients")
    with connect(loaded.address) as receiver, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as publisher:
        receiver.flood_control(soft="block")
        receiver.subscribe("held/")
        receiver.fence()
        publisher.connect(loaded.address)
        publisher.setblocking(False)
        try:
            while True:
                publisher.send(b"MSG held/x\0" + bytes(20_000))
        except BlockingIOError:
            pass  # the server does not read from it any more
        wait_for_figure(page, "held", lambda value: value == 1)
        page.get_by_label("Find").fill(str(os.getpid()))
        expect(page.locator("#clients-table", has_text=re.compile(r"held by #\d+"))).to_be_visible()


def test_keys(web: Web, open_page: OpenPage) -> None:
    """The tree has rates and last values, and can be walked with the arrow keys."""
    page = open_page(web.link + "")
    go(page, "Messages")
    tree = page.get_by_role("tree", name="Keys")
    item = tree.get_by_role("treeitem", name=re.compile("^sensors"))
    expect(item).to_have_attribute("aria-expanded", "true")
    expect(tree.locator(".branch", has_text="orders").first.locator(".pace")).to_contain_text("/s")
    tree.focus()
    page.keyboard.press("Home")

    def active() -> Locator:
        expect(tree).to_have_attribute("aria-activedescendant", re.compile("^key-"))  # it is drawn a frame later
        return page.locator(f"#{tree.get_attribute('aria-activedescendant')}")

    def move(key: str) -> None:
        before = tree.get_attribute("aria-activedescendant") or ""
        page.keyboard.press(key)
        expect(tree).not_to_have_attribute("aria-activedescendant", before)

    while active().locator(".name").inner_text() != "frame":  # keys may still come
        row = active()
        if row.get_attribute("aria-expanded") == "false":
            page.keyboard.press("ArrowRight")
            expect(row).to_have_attribute("aria-expanded", "true")
        else:
            move("ArrowDown")
    expect(active()).to_have_attribute("aria-level", "3")
    move("ArrowLeft")
    row = active()
    page.keyboard.press("ArrowLeft")
    expect(row).to_have_attribute("aria-expanded", "false")
    page.locator("#keys-pattern").fill("orders/")
    page.keyboard.press("Enter")
    expect(page.locator("#keys-hint")).to_contain_text("3 keys")
    tree.locator(".branch", has_text="paid").click()
    expect(page.locator("#publish-key")).to_have_value("orders/paid")


def test_live_tail(web: Web, open_page: OpenPage) -> None:
    """Messages come as they are published; they can be selected, stopped, and shown as JSON or in hexadecimal."""
    page = open_page(web.link)
    go(page, "Messages")
    page.locator("#tail-pattern").fill("orders/")
    page.keyboard.press("Enter")
    lines = page.locator("#lines details")
    expect(lines.nth(20)).to_be_attached()
    assert set(
        page.eval_on_selector_all("#lines .topic", "all => all.map(each => each.textContent.split('/')[0])")
    ) == {"orders"}
    page.locator("#tail-find").fill("paid")
    expect(page.locator("#lines details:visible .topic", has_text="shipped")).to_have_count(0)
    page.get_by_role("button", name="Pause").last.click()
    count = lines.count()
    page.wait_for_timeout(600)
    assert lines.count() == count
    page.locator("#lines details:visible summary").last.click()
    page.locator("#tail-format").select_option("JSON")
    expect(page.locator(".opened pre")).to_have_text(re.compile(r'^\{\n  "id": \d+,\n  "total": [\d.]+\n\}$'))
    page.locator("#tail-format").select_option("Hex")
    expect(page.locator(".opened pre")).to_have_text(re.compile(r'^000000  7b 22 69 64 22 3a .*\{"id":'))


def test_publish(web: Web, loaded: RunningBus, open_page: OpenPage) -> None:
    """What the form publishes reaches subscribers; it says if there are none, and what is wrong."""
    page = open_page(web.link)
    go(page, "Messages")
    result = page.locator("#publish-result")
    page.get_by_label("Key", exact=True).fill("form/x")
    payload = page.locator("#publish-payload")
    payload.fill("hello")
    page.get_by_role("button", name="Publish").click()
    expect(result).to_have_text("Published. Nobody subscribes to this key.")
    with connect(loaded.address) as bus:
        messages = bus.subscribe("form/")
        bus.fence()
        page.get_by_role("button", name="Who would get it?").click()
        expect(result).to_contain_text(f"(PID {os.getpid()}) by form/")
        payload.fill("00 ff 7f")
        page.locator("#publish-encoding").select_option("Hex")
        payload.press("Control+Enter")
        expect(result).to_have_text("Published.")
        assert messages.get(timeout=10) == (b"form/x", b"\0\xff\x7f")
    payload.fill("{")
    page.locator("#publish-encoding").select_option("JSON")
    page.get_by_role("button", name="Publish").click()
    expect(result).to_contain_text("no JSON")


# --- rights ------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user: run as root")
def test_a_refused_user_sees_the_messages(loaded: RunningBus, open_page: OpenPage) -> None:
    """A user whom the admin socket refuses is told so, and can still look at messages and publish."""
    with run_web(loaded.address, uid=OTHER_USER) as web:
        page = open_page(web.link)
        expect(page.locator("#problem")).to_contain_text("--admin-group")
        go(page, "Messages")
        expect(page.locator("#lines details").first).to_be_attached()
        page.get_by_label("Key", exact=True).fill("form/other")
        page.get_by_role("button", name="Publish").click()
        expect(page.locator("#publish-result")).to_contain_text("Published.")
        page.context.close()  # before its server stops


# --- other sites -------------------------------------------------------------------------------


class Evil(http.server.BaseHTTPRequestHandler):
    """A page of another origin on this machine."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>evil</title>")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def evil() -> Iterator[str]:
    """The origin of another program's page."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Evil)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_rebound_name_is_refused(web: Web, browser: Browser) -> None:
    """A site that points its name at 127.0.0.1 gets no file and no data, even with the token."""
    page = browser.new_page()
    answer = page.goto(f"http://{REBOUND}:{web.port}/#{web.token}")
    assert answer is not None
    assert answer.status == 403
    status = "token => fetch('/api/explain?key=a', {headers: {Authorization: `Bearer ${token}`}}).then(r => r.status)"
    assert page.evaluate(status, web.token) == 403
    page.close()


def test_a_page_of_another_port_is_refused(web: Web, evil: str, browser: Browser) -> None:
    """A page of another origin can neither read, nor send a message, nor frame the page, even if it knew the token."""
    page = browser.new_page()
    page.goto(evil)
    read = "([url, init]) => fetch(url, init).then(r => r.text(), error => 'blocked')"
    allowed = {"headers": {"Authorization": f"Bearer {web.token}"}}
    assert page.evaluate(read, [f"{web.origin}/", {}]) == "blocked"
    assert page.evaluate(read, [f"{web.origin}/api/explain?key=a", allowed]) == "blocked"
    sent = {**allowed, "method": "POST", "body": '{"key": "evil/x"}'}
    assert page.evaluate(read, [f"{web.origin}/api/publish", sent]) == "blocked"
    opaque = "url => fetch(url, {mode: 'no-cors', method: 'POST', body: '{}'}).then(r => r.type, error => 'blocked')"
    assert page.evaluate(opaque, f"{web.origin}/api/publish") in ("opaque", "blocked")
    framed = """url => new Promise(done => {
        const frame = document.createElement("iframe");
        frame.src = url;
        frame.onload = () => done(null);
        document.body.append(frame);
    })"""
    page.evaluate(framed, web.link)
    assert all("Who talks" not in (frame.content() or "") for frame in page.frames[1:])
    page.close()


def test_a_cross_site_request_is_refused_by_the_server(web: Web) -> None:
    """The refusal is the server's, not only the browser's: these are the headers that a browser sends."""
    for headers in (
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
        {"Host": "127.0.0.1.evil.example"},
    ):
        connection = http.client.HTTPConnection("127.0.0.1", web.port, timeout=10)
        connection.request("GET", "/", headers={"Authorization": f"Bearer {web.token}", **headers})
        assert connection.getresponse().status == 403
        connection.close()


# --- for everybody -----------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility(web: Web, open_page: OpenPage, scheme: str) -> None:
    """axe finds nothing to complain about in any view, in either set of colours."""
    page = open_page(web.link, color_scheme=scheme, bypass_csp=True)
    page.add_script_tag(path=AXE)
    for view, ready in (
        ("Overview", ".column-2 .label"),
        ("Clients", "#clients-table tbody tr"),
        ("Messages", "#lines details"),
    ):
        go(page, view)
        expect(page.locator(ready).first).to_be_attached()
        page.evaluate("document.querySelectorAll('.behind').forEach(each => { each.open = true; })")
        if view == "Messages":
            page.get_by_role("button", name="Pause").last.click()
            page.locator("#lines summary").last.click()
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        assert [
            (violation["id"], node["target"], node.get("failureSummary"))
            for violation in found["violations"]
            for node in violation["nodes"][:3]
        ] == []


def test_reduced_motion(web: Web, open_page: OpenPage) -> None:
    """Nothing moves for users who do not want it."""
    page = open_page(web.link, reduced_motion="reduce")
    path = page.locator(".ribbons path").first
    expect(path).to_be_attached()
    assert path.evaluate("each => getComputedStyle(each).transitionDuration") == "0s"


def test_small_windows(web: Web, open_page: OpenPage) -> None:
    """On a telephone nothing is wider than the window."""
    page = open_page(web.link)
    page.set_viewport_size({"width": 390, "height": 800})
    for view in ("Overview", "Clients", "Messages"):
        go(page, view)
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_text_from_the_bus_is_no_markup(web: Web, loaded: RunningBus, open_page: OpenPage) -> None:
    """Keys and payloads are shown as they are: nothing of them becomes an element."""
    page = open_page(web.link)
    go(page, "Messages")
    page.locator("#tail-pattern").fill("<img>/")
    page.keyboard.press("Enter")
    page.locator("#keys-pattern").fill("<img>/")
    page.keyboard.press("Enter")
    expect(page.locator("#tail-empty")).to_be_visible()
    with connect(loaded.address) as bus:
        deadline = time.monotonic() + 15
        while page.locator("#lines details").count() == 0 or page.locator(".branch").count() == 0:
            bus.publish("<img>/<b onclick=alert(1)>", b"<script>alert(1)</script>\x1b[31m")
            assert time.monotonic() < deadline
            page.wait_for_timeout(200)
    assert page.locator("#lines img, #lines b, #lines script, #tree img").count() == 0
    expect(page.locator("#lines .payload").first).to_have_text("<script>alert(1)</script>·[31m")


# --- much --------------------------------------------------------------------------------------


def busy(page: Page, seconds: float) -> float:
    """Return the part of a processor that the page takes, as the kernel counts it: other load does not matter."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent() -> float:
        found = session.send("Performance.getMetrics")["metrics"]
        return float(next(each["value"] for each in found if each["name"] == "TaskDuration"))

    before, began = spent(), time.monotonic()
    page.wait_for_timeout(1000 * seconds)
    return (spent() - before) / (time.monotonic() - began)


def test_many_clients_and_keys(web: Web, loaded: RunningBus, open_page: OpenPage) -> None:
    """A thousand clients and ten thousand keys are shown, and cost the page little more than few do."""
    sockets = []
    try:
        for at in range(1000):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.connect(loaded.address)
            sock.send(b"SUB many/%d/" % at)
            sockets.append(sock)
        page = open_page(web.link)
        go(page, "Clients")
        page.locator("#clients-limit").select_option("1000")
        expect(page.locator("#clients-table tbody tr")).to_have_count(1000)
        go(page, "Messages")
        page.locator("#keys-pattern").fill("wide/")
        page.keyboard.press("Enter")
        expect(page.locator("#keys-empty")).to_be_visible()
        page.wait_for_timeout(500)
        few = busy(page, 2.5)
        sockets[0].setblocking(True)
        for at in range(10_000):
            sockets[0].send(b"MSG wide/%d/%d\0%d" % (at // 100, at % 100, at))
            if at % 1000 == 999:
                page.wait_for_timeout(200)
        expect(page.locator("#keys-hint")).to_contain_text("10,000 keys")
        assert busy(page, 2.5) < 2 * few, few
        assert page.locator(".branch").count() < 120
    finally:
        for sock in sockets:
            sock.close()


def test_a_browser_that_does_not_read(web: Web, loaded: RunningBus) -> None:
    """A browser that stops reading makes the server hold a bounded amount, and hurts nobody else."""
    with socket.create_connection(("127.0.0.1", web.port)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"GET /api/events?tail=&keys= HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {web.token}\r\n\r\n"
        sock.sendall(head.encode())
        assert b"200 OK" in sock.recv(100)
        before = memory(web.pid)
        with connect(loaded.address) as bus:
            for _ in range(40):
                bus.publish_many((f"flood/{at}", bytes(4000)) for at in range(500))
                bus.fence()
        time.sleep(1)
        assert memory(web.pid) - before < 64 << 20


def memory(pid: int) -> int:
    """Return the bytes of a process in memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024


def test_a_unix_socket(loaded: RunningBus, directory: Path) -> None:
    """With --unix the page is on a socket of its user alone, and on no port."""
    path = directory / "page"
    with run_web(loaded.address, "--unix", str(path)) as web, socket.socket(socket.AF_UNIX) as sock:
        assert path.stat().st_mode & 0o777 == 0o600
        sock.connect(str(path))
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost:8080\r\nConnection: close\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 200 OK")
        assert len(web.token) == 43
    assert not path.exists()


# --- the documentation ---------------------------------------------------------------------------


def test_screenshot(web: Web, open_page: OpenPage, tmp_path: Path) -> None:
    """The picture of the documentation: SBUS_SCREENSHOT=docs/web.png makes it anew."""
    page = open_page(web.link)
    expect(page.locator(".column-2 .label").first).to_be_visible()
    wait_for_figure(page, "published", lambda value: value > 200)
    path = Path(os.environ.get("SBUS_SCREENSHOT") or tmp_path / "web.png")
    page.screenshot(path=path, full_page=True)
    assert path.stat().st_size > 50_000
