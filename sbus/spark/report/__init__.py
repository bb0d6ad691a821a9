"""The traffic of a period on one self-contained HTML page.

Spark computes the aggregates that it is made from.

Theory of operation
-------------------

A report has two halves, which meet in one class::

    rows of journals or a lake --analysis.measure--> Report --page.render--> HTML
    counts of a lake's hours   --counted.measure---> Report

``analysis`` turns rows into figures, with Spark. It passes over all messages twice: once for the messages per key and
window (`analysis.cube`), and once for the sizes of payloads. The period, the journals and the gaps take passes over few
columns. The cube is cached on the executors; traffic, top keys, publishers, silences and changes all come from it, so a
new section costs no further pass over the rows. What reaches this process is bounded by the number of windows (at most
300), by `top`, by seven prefixes, and by the users who publish, however much was recorded.

``counted`` turns the counts that are kept beside a lake into the same figures, for long periods, without Spark. What
follows the aggregates is written once (`analysis.compose`).

``page`` turns a `Report` into HTML, and knows neither Spark nor journals. ``sections`` gives each section its texts and
shapes, ``charts`` the geometry, ``format`` the numbers, ``highlights`` the sentences at the top; Jinja templates make
the markup. Keys and reasons are chosen by publishers, so every value is escaped by the template engine and not by hand;
the policy of the page forbids to load anything or to run any script but its own.

Two ideas keep the figures honest:

* *Gaps are no silence.* The journal has a row for each time in which messages may be missing (`analysis.gaps`). That
  time is subtracted before a pause counts as a silence, and rates are per second of recorded time.
* *The same span before.* Each period is compared with the one of the same length that ends where it begins, so keys
  that rest every night are not reported as silent.
"""

from __future__ import annotations

from sbus.spark.report.analysis.figures import Report
from sbus.spark.report.analysis.measure import measure
from sbus.spark.report.counted.measure import measure_counted
from sbus.spark.report.page.render import render

__all__ = ["Report", "measure", "measure_counted", "render"]
