"""The command lines of all packages: a parser makes a frozen request, and the library carries it out."""

from gguf_tools.system.locks import import_numpy

import_numpy()
