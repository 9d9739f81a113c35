"""`python -m quantize` is the command `quantize`."""

from gguf_tools.shadowing import run_command

if __name__ == "__main__":
    raise SystemExit(run_command("gguf_tools.commands.quantize", "python -m quantize"))
