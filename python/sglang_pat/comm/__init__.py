"""Communication between ranks of one node."""
