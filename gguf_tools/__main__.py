"""`python -m gguf_tools` is the command `gguf-tools`."""

from gguf_tools.cli import main

raise SystemExit(main())
