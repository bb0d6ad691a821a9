from sbus.routing.runs import Tally, build_messages, find_type, newest, next_messages, next_run, shortest, total_size

__all__ = ["Tally", "build_messages", "find_type", "newest", "next_messages", "next_run", "shortest", "total_size"]
