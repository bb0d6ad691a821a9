"""What services have in common: command line, signals, process settings, and how to launch one as a child process."""
