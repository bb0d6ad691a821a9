"""From the figures of a report to one HTML page."""
