"""The operators' view: the pages of the admin socket, metrics, taps and the log."""
