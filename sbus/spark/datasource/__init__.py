"""The Spark data source ``sbus``: reads journals, and publishes to a bus."""
