"""Other systems' interfaces on tritonattn's functions: imported on demand, by their full names."""
