"""The commands multimax-average, multimax-compare and multimax-evaluate."""
