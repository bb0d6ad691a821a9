"""Metrics of one program: families of figures, their text for Prometheus, and a file that is replaced as a whole.

The file is for the textfile collector of Prometheus's node_exporter, or for any program that reads the text format. A
reader finds the old file or the new one, never a part. It is readable for all users: it contains figures alone.

Names follow Prometheus's conventions: a prefix, base units, ``_total`` for counters (added here). Two daemons of one
kind on a host have the same names, and node_exporter reads the files of both as one. So every daemon gives its figures
a label that no other one has, such as its journal.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sbus.errors import UsageError
from sbus.ownership import replacing

__all__ = ["MetricsFile", "counter", "gauge", "text_of"]


def counter(name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    """Return a counter; its samples get ``_total``.

    :param text: its meaning, and the remedy if it rises.
    :param value: the figure, or figures by the value of `label`.
    """
    return _family(CounterMetricFamily, name, text, value, label)


def gauge(name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    """Return a figure that goes up and down; see `counter`."""
    return _family(GaugeMetricFamily, name, text, value, label)


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    value: float | Mapping[str, float],
    label: str,
) -> Metric:
    if not isinstance(value, Mapping):
        return kind(name, text, value=value)
    family = kind(name, text, labels=[label])
    for word, figure in value.items():
        family.add_metric([word], figure)
    return family


class _Family:
    """One family, as the library's renderer takes it."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> list[Metric]:
        return [self._metric]


def text_of(metric: Metric, labels: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return one family in Prometheus's text format.

    :param labels: labels that all samples get besides their own.
    """
    if labels:
        metric.samples = [sample._replace(labels={**labels, **sample.labels}) for sample in metric.samples]
    return generate_latest(_Family(metric)).decode()


class MetricsFile:
    """A file with metrics.

    :param path: where it is; its directory must exist, and this process must be able to write there.
    :param labels: what tells these figures from those of another program of the same kind.
    :param option: the option that gave the path, for errors.
    :raises UsageError: if there is no such directory, or it cannot be written to.
    """

    def __init__(
        self, path: str, labels: Mapping[str, str] = MappingProxyType({}), option: str = "--metrics-file"
    ) -> None:
        self.path = os.path.abspath(path)
        self._labels = {name: text.encode(errors="replace").decode() for name, text in labels.items()}
        self._option = option
        directory = os.path.dirname(self.path)
        if not path or os.path.isdir(self.path):
            raise UsageError(f"{option}={path}: not a file: name one, such as /var/lib/node_exporter/sbus.prom")
        if not os.path.isdir(directory):
            raise UsageError(f"{option}={path}: there is no directory {directory}: make it first")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise UsageError(f"{option}={path}: cannot write to {directory}: choose another directory, or chown it")

    def write(self, metrics: Iterable[Metric]) -> None:
        """Replace the file.

        :raises OSError: if it cannot be written; the old file stays.
        """
        text = "".join(text_of(metric, self._labels) for metric in metrics).encode()
        with replacing(self.path, 0o644) as file:
            file.write(text)

    def problem(self, error: OSError) -> str:
        """Return the text of a problem that `write` had, for the log."""
        return (
            f"cannot write the metrics to {self.path}: {error.strerror}: make room there, or name another file "
            f"({self._option})"
        )

    def remove(self) -> None:
        """Remove the file: its figures are over."""
        with suppress(OSError):
            os.unlink(self.path)
