"""What is on the screen, one pane a file: pure functions of a picture, a view and a size."""
