"""A suite: classes of texts, each read in its own way, by which a file is measured."""
