"""python -m harness.plan: see command.py."""

from harness.plan.command import main

if __name__ == "__main__":
    main()
