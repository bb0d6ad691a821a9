"""Everything at once, to be watched: a plant on a bus, recorded, looked after by a streaming query, and reported on."""
