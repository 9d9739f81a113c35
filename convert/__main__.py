"""`python -m convert` is the command `convert-hf-to-gguf`."""

from gguf_tools.lazy import stop_if_hidden

if __name__ == "__main__":
    stop_if_hidden("python -m convert")
    from gguf_tools.commands.convert import main

    raise SystemExit(main())
