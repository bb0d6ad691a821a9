"""How fast the bus is, beside other buses: ``python benchmarks/run.py`` (README.rst here tells the rest)."""
