"""Measures ways to train: time, bytes on the network, bytes in memory, losses."""
