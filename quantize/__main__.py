"""`python -m quantize` is the command `quantize`."""

from gguf_tools.lazy import stop_if_hidden

if __name__ == "__main__":
    stop_if_hidden("python -m quantize")
    from gguf_tools.commands.quantize import main

    raise SystemExit(main())
