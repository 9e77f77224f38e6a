"""What runs on hosts. Nothing here imports the notebook's side: engines, display, magic."""
