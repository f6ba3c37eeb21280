"""How fast, how many, how large: each tier measured on this machine, as ratios to a plain Python process."""
