"""`python -m imatrix` is the command `imatrix`."""

from gguf_tools.lazy import stop_if_hidden

if __name__ == "__main__":
    stop_if_hidden("python -m imatrix")
    from gguf_tools.commands.imatrix import main

    raise SystemExit(main())
