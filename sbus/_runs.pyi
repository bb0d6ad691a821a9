from sbus.runs import build_messages, next_messages, next_run

__all__ = ["build_messages", "next_messages", "next_run"]
