"""The recorder, its journal, and Spark: what the extras bring."""
