"""Small networks on images of digits, to see which findings on text hold for vision."""
