"""`python -m imatrix` is the command `imatrix`."""

from gguf_cli.imatrix import main

raise SystemExit(main())
