"""Queues: a service, itself a client of the bus, that gives each job to one worker.

Theory of operation
-------------------

`sbus.queue.jobs` decides, in memory, without I/O. `sbus.queue.store` makes its decisions durable. `sbus.queue.service`
joins the two to the bus: what arrives is applied at once. Then, turn by turn, all changes go to the disk in one
transaction, and only after that does the service confirm new jobs and send those that it hands out. `sbus.queue.turns`
says when a turn begins. A disk that refuses is asked again; no turn overtakes another.

A worker announces itself: ``ready`` names the most jobs that it takes at once, and those that it has. It announces
itself anew after each interruption, with another *round*. Jobs of an earlier round that it does not have were lost on
the way: they are available again, and the worker drops them should they still arrive.

A worker is gone when its process ends (a pidfd, if bus and service share its PID namespace) or when nobody subscribes
to ``queue/NAME/worker/<token>`` (the bus waits 100 ms, and monitors count). At the latest the lease ends. Acks count
only from the client to which the job went.

:ref:`queue-wire` has the table of the messages.
"""
