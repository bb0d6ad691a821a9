"""The jobs: archive, traffic, replay, and the tables they read and write."""
