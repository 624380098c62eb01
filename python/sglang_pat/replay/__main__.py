"""``python -m sglang_pat.replay``."""

import sys

from sglang_pat.replay.cli import main

if __name__ == "__main__":
    sys.exit(main())
