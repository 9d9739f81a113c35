"""`python -m quantize` is the command `quantize`."""

from gguf_cli.quantize import main

raise SystemExit(main())
