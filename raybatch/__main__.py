"""Runs the command line as `python -m raybatch`."""

from raybatch.cli.app import main

if __name__ == "__main__":
    main()
