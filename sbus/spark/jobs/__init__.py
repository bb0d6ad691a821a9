"""The jobs on Spark: archive, traffic and replay, and the tables that they read and write."""
