"""`python -m scalejax` is the same as `scalejax`."""

from scalejax.cli import main

if __name__ == "__main__":
    main()
