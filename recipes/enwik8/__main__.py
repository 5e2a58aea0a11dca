"""`python -m recipes.enwik8`: pretrain a decoder on a text and watch its geometry."""

from recipes.enwik8.train import main

main()
