"""Routing: which receivers a routing key reaches, found once and cached. No input or output."""
