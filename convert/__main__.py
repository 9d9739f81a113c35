"""`python -m convert` is the command `convert-hf-to-gguf`."""

from gguf_cli.convert import main

raise SystemExit(main())
