from sbus.routing.trie import _collect as collect
from sbus.routing.trie import _collect_readers as collect_readers
from sbus.routing.trie import _Node as Node

__all__ = ["Node", "collect", "collect_readers"]
