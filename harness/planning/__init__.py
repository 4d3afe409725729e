"""Estimates memory and time on machines that nobody has started."""
