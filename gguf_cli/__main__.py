"""The command `gguf-tools`, as `python -m gguf_cli`."""

from gguf_cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
