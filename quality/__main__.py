"""`python -m quality` is the command `evaluate`."""

from gguf_tools.shadowing import run_command

if __name__ == "__main__":
    raise SystemExit(run_command("gguf_tools.commands.evaluate", "python -m quality"))
