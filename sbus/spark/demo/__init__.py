"""The demo: a plant on a bus, with recorder, streaming query, archive and report."""
