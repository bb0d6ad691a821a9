"""The commands of operators: they ask the admin socket of a bus."""
