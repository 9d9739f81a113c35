"""`python -m gguf_tools` is the command `gguf-tools`."""

from gguf_cli.main import main

raise SystemExit(main())
