"""Pairs of connected sockets."""

from __future__ import annotations

import importlib
import socket

import pytest


def load(name):
    try:
        return importlib.import_module(f"sbus.syscalls.{name}")
    except ImportError:
        pytest.skip(f"{name} is not built")


def socketpair():
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)


def small(sock):
    """Give a socket the smallest send buffer, which holds a few packets."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
