"""From rows to the figures of a report, computed by Spark."""
