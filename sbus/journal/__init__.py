"""The journal: what crossed a bus, kept on disk in the Arrow format, to be read by anything.

It knows neither Twisted nor Spark nor the bus. `sbus.journal.writer` is for the one who records,
`sbus.journal.reader` for all who read; docs/pipeline/3-journal.rst describes the format.
"""
