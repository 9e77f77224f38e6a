"""What a cell needs from the notebook, and how it travels to the ranks and back."""
