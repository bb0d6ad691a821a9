"""Single steps of a packet's way, timed: to catch a slow-down before it lands (compare.py)."""
