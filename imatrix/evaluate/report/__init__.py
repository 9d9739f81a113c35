"""An evaluation as one page: charts, maps of tensors, and the texts where a file is worst."""
