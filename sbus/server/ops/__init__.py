"""What operators see: the pages of the admin socket, metrics, taps and the log."""
