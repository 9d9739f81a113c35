"""`python -m quantize` is the command `quantize`."""

from quantize.cli import main

raise SystemExit(main())
