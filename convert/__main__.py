"""`python -m convert` is the command `convert-hf-to-gguf`."""

from convert.cli import main

raise SystemExit(main())
