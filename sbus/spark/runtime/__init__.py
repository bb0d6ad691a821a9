"""The environment of every job: a session, Java, the package on the executors, and readable errors."""
