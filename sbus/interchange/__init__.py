"""Interchange: rows of a journal in the files of other programs, and back.

==================  ===========================================================================================
`rows`              a row, and the rows of a journal that a command chooses
`jsonl`             lines of JSON, as ``sbus sub --json`` and ``sbus journal cat --json`` print them
`mcap`              MCAP, the format of Foxglove and of rosbag2
`parquet`           one Parquet file with the columns of a lake
`importing`         rows become a journal of their own
`damaged`           errors of a file that cannot be read
==================  ===========================================================================================

Each format is a module with ``write``, from chosen rows to a file, and ``read``, from a file to rows. Both go through
the rows once, so memory is bounded.
"""
