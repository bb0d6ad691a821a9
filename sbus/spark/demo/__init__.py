"""The demo: a plant on a bus, with a recorder, a streaming query, an archive and a report."""
