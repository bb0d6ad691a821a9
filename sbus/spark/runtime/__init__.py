"""The environment of every job: session, Java, package on executors, errors."""
