"""The Spark data source ``sbus``: journals as tables and streams, and a sink that publishes."""
