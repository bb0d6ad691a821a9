"""The Spark jobs archive, traffic and replay, and the tables that they use."""
