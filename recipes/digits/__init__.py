"""Small networks on images of digits: which findings on text hold for vision."""
