"""Interchange: convert rows of a journal to files of other programs, and back.

==================  ===========================================================================================
`rows`              a row, and the rows of a journal that a command chooses
`jsonl`             lines of JSON, as ``sbus sub --json`` and ``sbus journal cat --json`` print them
`mcap`              MCAP, the format of Foxglove and of rosbag2
`parquet`           one Parquet file with the columns of a lake
`importing`         make a new journal of rows
`damaged`           turn the libraries' errors for a bad file into one with a remedy
==================  ===========================================================================================

Each format is a module: ``write`` writes chosen rows to a file, and ``read`` yields the rows of a file. Both pass over
the rows once, so memory is bounded.
"""
