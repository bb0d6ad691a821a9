from sbus.routing.runs import build_messages, next_messages, next_run, total_size

__all__ = ["build_messages", "next_messages", "next_run", "total_size"]
