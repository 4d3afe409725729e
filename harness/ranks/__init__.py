"""Starts processes, lets them find each other and send messages, and ends every program in a tidy way."""
