"""The parts that layers are made of, and how their weights are loaded."""
