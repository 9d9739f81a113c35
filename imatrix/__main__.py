"""`python -m imatrix` is the command `imatrix`."""

from imatrix.cli import main

raise SystemExit(main())
