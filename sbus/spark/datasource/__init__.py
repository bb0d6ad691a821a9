"""The Spark data source ``sbus``: journals as tables and streams, and DataFrames published to a bus."""
