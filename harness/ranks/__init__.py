"""Starts ranks, the processes of a training run, lets them find each other and send messages, and ends programs."""
