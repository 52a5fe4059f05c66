"""One pipeline's call on several ranks: tokens and guidance branches."""
