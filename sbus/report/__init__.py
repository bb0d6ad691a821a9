"""The traffic of a period on one self-contained HTML page.

Theory of operation
-------------------

A report has two halves, which meet in one class::

    rows of journals or a lake, or counts of its hours --engine.measure--> Report --page.render--> HTML

``engine`` needs neither Spark nor Java: DuckDB computes in this process. `engine.sources` yields rows as Arrow batches,
and `engine.store` counts them by journal, key, size, publisher and window as they come, so that neither memory nor the
disk holds the rows. For long periods of a lake the counts of its hours (`sbus.lake.hourly`) take their place. All
figures come from these counts; what reaches Python is bounded by the number of windows (at most 300), by `top`, and by
a few prefixes.

``page`` turns a `Report` into HTML, and knows neither DuckDB nor journals. Keys and reasons are chosen by publishers,
so the template engine escapes every value; the page's policy forbids to load anything or to run any script but its own.

Three ideas keep the figures honest:

* *Gaps are no silence.* The time in which messages may be missing is subtracted before a pause counts as a silence.
* *Each journal has its own recorded time.* Rates are per second of the time in which the journal of a message was
  written.
* *The same span before.* Each period is compared with the one of the same length that ends where it begins, so keys
  that rest every night are not silent.
"""

from __future__ import annotations

from sbus.report.engine.measure import measure
from sbus.report.engine.sources import JournalRows, LakeRows, Source
from sbus.report.figures import Report
from sbus.report.page.render import render

__all__ = ["JournalRows", "LakeRows", "Report", "Source", "measure", "render"]
