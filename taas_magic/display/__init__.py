"""Events of a run -> what the notebook shows. Runs in the kernel, in the cell's thread."""
