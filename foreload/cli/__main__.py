"""`python -m foreload.cli`: the command, where its script is not on the path."""

import sys

from foreload.cli import main

sys.exit(main())
