"""`python -m rollmesh` is the command line."""

import sys

from rollmesh.cli import main

sys.exit(main())
