"""``python -m mtplx``: the command `mtplx`."""

from mtplx.cli import main

if __name__ == "__main__":
    main()
