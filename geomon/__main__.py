"""The command line by another name: `python -m geomon`."""

from geomon.cli import main

if __name__ == "__main__":
    main()
