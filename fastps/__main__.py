"""`python -m fastps`: the command line."""

from fastps.cli.main import main

if __name__ == "__main__":
    main()
