"""The cosine between isotropic rows by width, and that of the rows of trained models beside it."""
