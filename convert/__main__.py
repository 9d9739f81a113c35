"""`python -m convert` is the command `convert-hf-to-gguf`."""

from gguf_tools.shadowing import run_command

if __name__ == "__main__":
    raise SystemExit(run_command("gguf_tools.commands.convert", "python -m convert"))
