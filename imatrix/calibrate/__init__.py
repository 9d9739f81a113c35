"""Files of the same types and size whose errors the model notices less."""
