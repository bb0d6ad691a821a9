"""The client that records a bus: what crosses it becomes rows of a journal (`sbus.journal`).

`sbus.recorder.service.RecorderService` is a Twisted service for any application, ``twistd sbus-recorder`` a process of
its own, and ``twistd sbus --record=DIR`` has one run beside the bus. docs/pipeline/2-recorder.rst is for its users.
"""
