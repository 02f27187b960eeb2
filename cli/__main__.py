"""``python -m unlost.cli``: the command, wherever the script is not on the path."""

from __future__ import annotations

from .main import main

if __name__ == "__main__":
    main()
