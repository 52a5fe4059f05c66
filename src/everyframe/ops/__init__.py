"""Operations that all model families share; kernels are chosen here only."""
