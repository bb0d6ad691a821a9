"""Render a report as one HTML document, with the templates in this package.

Jinja escapes every value that a template inserts; the only markup that comes from elsewhere is the package's own style
sheet and script. No other module of the project imports Jinja.
"""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sbus.report.figures import Report
from sbus.report.page.charts import HEIGHT
from sbus.report.page.format import moment, printable_key
from sbus.report.page.highlights import highlights
from sbus.report.page.sections.changes import changes
from sbus.report.page.sections.header import header
from sbus.report.page.sections.publishers import publishers
from sbus.report.page.sections.recording import recording
from sbus.report.page.sections.silences import silences
from sbus.report.page.sections.sizes import sizes
from sbus.report.page.sections.top_keys import top_keys
from sbus.report.page.sections.traffic import traffic
from sbus.version import __version__

__all__ = ["render"]


def render(report: Report, *, source: str = "", title: str = "Traffic report", now: datetime | None = None) -> str:
    """Return the report as one HTML document.

    The page refers to nothing outside of itself, and its content security policy forbids it: it loads no address, and
    runs no script but its own, which the policy names by its SHA-256 digest.

    :param source: where the figures come from, for the footer.
    :param now: the time of making, for the footer.
    """
    style, script = (Markup(_read(name)) for name in ("style.css", "script.js"))
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=title,
            heading=f"{title}: {moment(report.period.start)}",
            version=__version__,
            style=style,
            script=script,
            script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            header=header(report),
            highlights=highlights(report),
            traffic=traffic(report),
            silences=silences(report),
            recording=recording(report),
            changes=changes(report),
            top=top_keys(report),
            sizes=sizes(report),
            publishers=publishers(report),
            source=source,
            made=(now or datetime.now(UTC)).astimezone(UTC),
            journals=len(report.journals),
            hosts=sorted({found.host for found in report.journals.values() if found.host}),
        )
    )


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["printable"] = printable_key
    environment.globals["HEIGHT"] = HEIGHT
    # As `json.dumps`, in the order of the figures; the filter tojson then escapes what could end a script element.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment
