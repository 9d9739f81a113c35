"""`python -m quality` is the command `evaluate`."""

from quality.cli import main

raise SystemExit(main())
