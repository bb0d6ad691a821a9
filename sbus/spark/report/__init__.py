"""The traffic of a period on one page: a self-contained HTML file, made from aggregates that Spark computes."""

from __future__ import annotations

from sbus.spark.report.analysis.figures import Report
from sbus.spark.report.analysis.measure import measure
from sbus.spark.report.page.render import render

__all__ = ["Report", "measure", "render"]
