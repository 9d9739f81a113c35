"""`python -m quality` is the command `evaluate`."""

from gguf_cli.evaluate import main

raise SystemExit(main())
