from sbus.runs import next_messages, next_run

__all__ = ["next_messages", "next_run"]
