"""Groups of arguments that several commands share, and what each group says as options of the library."""
