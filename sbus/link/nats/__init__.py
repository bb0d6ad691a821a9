"""The bridge between a bus and NATS (``twistd sbus-nats``); it needs the extra ``nats``."""
