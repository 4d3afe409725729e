"""Watch it run: the cores recorded from outside, line by line, on every rank, and played in a terminal or on a page."""
