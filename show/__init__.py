"""Watch it run: each stage's optimizer is recorded from outside, line by line, on every rank, and a page plays that."""
