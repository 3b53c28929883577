"""``python -m gnomon``: the command ``gnomon``."""

from gnomon.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
