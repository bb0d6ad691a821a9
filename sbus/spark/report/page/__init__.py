"""From figures to one HTML page."""
