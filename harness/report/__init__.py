"""What was measured, for readers: tables, pictures, sentences, the pages, and the check of the pages.

Called by `make report`, `make docs-check`, and by every program that shows what it has found.
"""
