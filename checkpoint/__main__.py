"""python -m checkpoint convert …: see convert.py."""

from .convert import main

if __name__ == "__main__":
    main()
