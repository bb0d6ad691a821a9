"""Lakes without Spark: table formats, and the maintenance of a lake between its batches."""
