"""The claims of the papers that a character decoder decides, over several seeds."""
