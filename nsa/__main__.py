"""``python -m nsa`` is the command ``nsa``."""

import sys

from nsa.cli import main

sys.exit(main())
