"""Files made to hurt: each is refused in one line, or opened where that is right, within narrow limits."""
