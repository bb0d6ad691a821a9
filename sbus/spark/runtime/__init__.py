"""What every job needs to run: a session, Java, the modules shipped to executors, and readable errors."""
