"""The command `sensitivity`, as `python -m calibrate`."""

from gguf_cli.sensitivity import main

if __name__ == "__main__":
    raise SystemExit(main())
