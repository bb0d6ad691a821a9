"""Routing: the receivers of a key, looked up once and then cached. No I/O."""
