"""What a run on many devices would hold and take: dry runs of the rows, replayed on stated hardware.

Called by `make plan`.
"""
