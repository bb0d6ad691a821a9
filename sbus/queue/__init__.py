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

Below ``queue/NAME/``; words are separated by spaces, ``…`` is the payload:

=================  =========================================================================================
``put/<key>``      request ``[id=ID] [not-before=TIME]\\0…``, answered ``<job>`` once the job is on disk
``ready``          ``<token> <round> <credit> [<job>:<tries>]…``
the inbox          ``<round> <job> <tries> <lease> <sender> <key>\\0…``, at ``<worker>/sbus/work/<token>``, or
                   ``-<why>``: there is no place for the worker
``ack``            ``<token> [<job> <tries>]…``
``renew``          ``<token> <job> <tries>``
``nack``           ``<token> <job> <tries> released|failed|poison <why>``
``dead/<key>``     ``<job> <tries> <reason>\\0…``, published when a job dies
``up``             published when the service is ready: workers announce themselves anew
``admin/<verb>``   request: ``ls``, ``peek``, ``retry`` or ``drain``, and a JSON object; answered in JSON
``queue/ls``       request, answered by the service of each queue as ``admin/ls`` is
=================  =========================================================================================
"""
