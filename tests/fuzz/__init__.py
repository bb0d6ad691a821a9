"""Fuzz targets, with a short run as part of the tests and an endless one by hand."""
