"""Attacks by one unprivileged user on a bus, and their effect on the clients of another user.

*Theory of operation.* A fresh ``twistd sbus`` listens on a socket of mode 0777. Three users take part: root runs the
server and this program, one user attacks, and one user is the *bystander*. The bystander owns a pair of clients that
exchange messages through the router at a fixed rate, and one process that keeps connecting as a new client.

Each row is one server process and three phases, so that a disturbance of the machine meets all three:

1. *idle*: the bystander alone;
2. *spinners*: beside processes that only spin, as many as the attack has. This is what losing the CPU costs;
3. *attack*: beside the attacking processes. SIGTERM comes while they still attack.

A phase measures round trips, from the start of the other processes until ``--secs`` seconds after their set-up; then
throughput, for ``--secs`` seconds. Round trips are *open-loop*: each has a scheduled time, and counts from that time,
whether or not the message could be sent by then. A message without an answer counts with the time that it has waited.
So a server that stands still for a second spoils every round trip of that second, not one.

In some rows the bystanders are a *crowd*: clients of one user or several, each with one message to itself under way all
the time. Their round trips are closed-loop, and the number of these is the throughput. So each message is a lone one,
and the server cannot share the work of a batch.

*Bounds.* Each attacking process has a deadline, an alarm clock behind it, and dies with its parent. Processes are
ended by their IDs. A server that does not end within ``--patience`` seconds of SIGTERM is killed and reported.
"""
