from sbus.runs import next_run

__all__ = ["next_run"]
