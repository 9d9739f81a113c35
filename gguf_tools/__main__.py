"""`python -m gguf_tools` is the command `gguf-tools`."""

from gguf_tools.lazy import stop_if_hidden

if __name__ == "__main__":
    stop_if_hidden("python -m gguf_tools")
    from gguf_tools.commands.main import main

    raise SystemExit(main())
