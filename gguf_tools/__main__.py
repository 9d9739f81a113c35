"""`python -m gguf_tools` is the command `gguf-tools`."""

from gguf_tools.shadowing import run_command

if __name__ == "__main__":
    raise SystemExit(run_command("gguf_tools.commands.main", "python -m gguf_tools"))
