"""From the rows of journals or a lake to the figures of a report, computed by DuckDB."""
