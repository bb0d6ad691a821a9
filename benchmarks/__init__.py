"""Benchmarks of the bus beside other buses: ``python benchmarks/run.py``; see README.rst."""
