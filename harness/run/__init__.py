"""Processes: the command line and its refusals, ranks, how they find each other and end. Called by every room above."""
