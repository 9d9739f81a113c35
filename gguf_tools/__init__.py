"""GGUF files, and everything that makes them: one place to import from.

>>> import gguf_tools
>>> gguf_tools.convert("DeepSeek-V2-Lite", "lite-bf16.gguf", outtype="bf16").paths[0].name
'lite-bf16.gguf'
>>> result = gguf_tools.quantize("lite-bf16.gguf", "lite-Q4_K_M.gguf", "Q4_K_M")
>>> with gguf_tools.open_gguf("lite-Q4_K_M.gguf") as file:
...     file.get("general.architecture")
'deepseek2'

To make files

    convert          a GGUF file of a checkpoint, quantized if you like
    convert_adapter  a file of a LoRA adapter, which llama.cpp adds to the file of its base
    quantize         a quantized file of a GGUF file, a folder or a model of the Hub
    quantize_many    files of several types, of weights that are read once
    calibrate        a quantized file that errs little on a text
    refine           a quantized file whose scales are moved so that it diverges less
    cook             importances, files, their evaluation, a card and checksums, in one run
    split            a split set of a file
    merge            a file of a split set
    write_texts      the texts to calibrate with that come along

To look at files and measure them

    show             metadata, tensors and totals
    diff             differences between two files
    verify           faults of a file
    scan             suspicious content in a stranger's file
    audit            whether a file is what its base makes of it
    rederive         whether a file has the bytes that its source gives
    lint             what a file type would do to a model
    evaluate         perplexity, and divergence from a base on a text
    evaluate_suite   the same by class of text
    sensitivity      divergence that each tensor adds at each type

To publish files

    card             README.md for the Hub
    upload           files to the Hub

To work with what is in files

    open_gguf        a GGUF file, or a split set
    open_checkpoint  the weights of a checkpoint
    read_values      a tensor of a GGUF file as float32
    encode           an array as blocks of a type
    decode           the array in such blocks
    read_suite       classes of texts
    parse_overrides  types for tensors, as the command line has them

`imatrix` and `edit` are modules: importance matrices, and changes of headers. All is loaded when it is first
used. The package itself reads, lays out, writes and shows GGUF files; the other packages use it.
"""

from gguf_tools.lazy import public_names

__version__ = "0.1.0"
"""The one place: pyproject.toml reads it from here, so no command looks for what is installed to tell it."""

__all__, __getattr__, __dir__ = public_names(__name__)
