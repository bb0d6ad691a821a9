from sbus.routing.runs import Tally, build_messages, next_messages, next_run, total_size

__all__ = ["Tally", "build_messages", "next_messages", "next_run", "total_size"]
