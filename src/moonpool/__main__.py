"""`python -m moonpool`, the same as the command `moonpool`."""

from moonpool.cli import main

if __name__ == "__main__":
    main()
