"""Services as processes: command line, signals, memory, and how to launch one."""
