import sys

from sglang_pat.acceptance.cli import main

if __name__ == "__main__":
    sys.exit(main())
