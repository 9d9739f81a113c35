"""`python -m imatrix` is the command `imatrix`."""

from gguf_tools.shadowing import run_command

if __name__ == "__main__":
    raise SystemExit(run_command("gguf_tools.commands.imatrix", "python -m imatrix"))
