"""Operations that every model family shares: the one place where a kernel is chosen."""
