"""How tokens look at each other: one module for each kind of attention."""
