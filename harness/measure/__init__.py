"""Rows and stages measured: checked, counted and timed, on one machine, on two hosts, on a GPU.

Called by bench.py, `make network`, `make timeline`, `make host`, `make cuda`; its instruments by tests and grade/.
"""
