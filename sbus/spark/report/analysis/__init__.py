"""From rows to figures: what a report is computed from."""
