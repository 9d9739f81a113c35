"""What the user may choose: nothing."""

from convert.architectures.decoder.options import Options as Options
