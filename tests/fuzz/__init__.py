"""Fuzz targets: what they check, a short run that belongs to the tests, and one without end for whoever has time."""
