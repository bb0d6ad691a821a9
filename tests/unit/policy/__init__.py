"""Tests of the room `sbus.policy`."""
