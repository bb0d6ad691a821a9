"""What every service run by ``twistd`` shares: command line, signals, process settings."""
