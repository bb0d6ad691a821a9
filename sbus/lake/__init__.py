"""Lakes without Spark: table formats, and what is done to a lake between its batches."""
