"""The command lines of all packages: a parser makes a frozen request, and the library carries it out."""
