"""`python -m calibrate` is the command `sensitivity`."""

from gguf_tools.shadowing import run_command

if __name__ == "__main__":
    raise SystemExit(run_command("gguf_tools.commands.sensitivity", "python -m calibrate"))
