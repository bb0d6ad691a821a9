"""The first program: publish a message, and receive it."""

import sbus

with sbus.connect() as bus, sbus.connect() as other:
    bus.subscribe("greetings/")
    bus.fence()  # the subscription is in force
    other.publish("greetings/world", b"hello")
    message = bus.receive()
    print(message.key.decode(), message.payload.decode())
