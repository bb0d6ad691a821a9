"""The bus as a program: services, command lines, and the processes that it starts."""
