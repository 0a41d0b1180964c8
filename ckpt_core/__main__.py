"""``python -m ckpt_core``: the ``ckpt`` command without its console script."""

import sys

from ckpt_core.cli import main

sys.exit(main())
