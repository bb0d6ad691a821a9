"""From the counts of hours to the figures of a report, computed by DuckDB."""
