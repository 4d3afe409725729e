"""python -m harness.report: see pages.py."""

from harness.report.pages import main

if __name__ == "__main__":
    main()
