"""The commands multimax-average and multimax-evaluate."""
